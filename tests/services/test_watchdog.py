"""Tests of when the watchdog reports an engine as unwell or lost. The clock, streams and engine are fakes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from structlog.testing import capture_logs

from common.device.stream import StreamKind
from common.errors import EngineLost, EngineStalled
from common.service.engine_thread import EngineInbox, EngineThread
from common.service.watchdog import LOOK_INTERVAL_S, UNREADY_AFTER_S, Watchdog, WatchedEngine, WatchedRanks
from common.telemetry.stats import EngineLoad, PoolCounts
from tests.support.scripted_device import ScriptedDevice, ScriptedStream

STALL_TIMEOUT_S = 60.0
BOUND_S = 60.0


@dataclass
class ScriptedEngine:
    is_alive: bool = True
    death: BaseException | None = None
    is_stepping: bool = False
    num_steps_begun: int = 0

    def polls(self) -> None:
        """Runs a step that has nothing to do."""
        self.num_steps_begun += 1


@dataclass
class Rig:
    engine: ScriptedEngine = field(default_factory=ScriptedEngine)
    device: ScriptedDevice = field(default_factory=ScriptedDevice)
    now_s: float = 1000.0
    num_layers: int = 0

    def __post_init__(self) -> None:
        self.forward = self.device.new_stream("forward")
        self.sending = self.device.new_stream("sending", StreamKind.COPY)
        self.watchdog = self.watch(self.engine)
        self.watchdog.look()

    def watch(self, engine: WatchedEngine, ranks: WatchedRanks | None = None) -> Watchdog:
        return Watchdog(
            engine=engine,
            device=self.device,
            num_layers_begun=lambda: self.num_layers,
            ranks=ranks,
            stall_timeout_s=STALL_TIMEOUT_S,
            clock=lambda: self.now_s,
        )

    def look_at(self, watchdog: Watchdog, seconds: float) -> None:
        for _ in range(round(seconds / LOOK_INTERVAL_S)):
            self.now_s += LOOK_INTERVAL_S
            watchdog.look()

    def look_for(self, seconds: float, *, polls: bool = True, layers: int = 0, sends: bool = False) -> None:
        """Lets the watchdog poll for this many seconds. Between any two polls, the engine polls its queue if `polls`,
        the forward writes `layers` layers, and a segment is sent if `sends`.
        """
        for _ in range(round(seconds / LOOK_INTERVAL_S)):
            self.now_s += LOOK_INTERVAL_S
            if polls:
                self.engine.polls()
            if sends:
                self.sending.run_next()
                self.sending.enqueue(nothing)
            self.num_layers += layers
            self.watchdog.look()

    def hang(self, stream: ScriptedStream) -> None:
        """Makes the stream hang: it gets a piece of work that the test never runs."""
        stream.enqueue(nothing)


def nothing() -> None:
    pass


@pytest.fixture
def rig() -> Rig:
    return Rig()


JUST_BEFORE_S = UNREADY_AFTER_S - 2 * LOOK_INTERVAL_S
SOON_AFTER_S = 4 * LOOK_INTERVAL_S


def assert_stalls(rig: Rig, part: str, **goes_on: int | bool) -> None:
    """Asserts that the engine is unwell within 5 s, and lost after the stall time-out with `part` as the reason, and
    that neither happens earlier. `goes_on` are options of `look_for`.
    """
    rig.look_for(JUST_BEFORE_S, **goes_on)  # type: ignore[arg-type]
    assert rig.watchdog.is_well
    rig.look_for(SOON_AFTER_S, **goes_on)  # type: ignore[arg-type]
    assert not rig.watchdog.is_well
    assert rig.watchdog.lost is None
    rig.look_for(STALL_TIMEOUT_S - UNREADY_AFTER_S - 1, **goes_on)  # type: ignore[arg-type]
    assert rig.watchdog.lost is None
    rig.look_for(2, **goes_on)  # type: ignore[arg-type]
    assert isinstance(rig.watchdog.lost, EngineStalled)
    assert str(rig.watchdog.lost) == f"{part} has not moved for {STALL_TIMEOUT_S} s"


def test_unwell_is_told_within_five_seconds() -> None:
    assert UNREADY_AFTER_S + 3 * LOOK_INTERVAL_S < 5


@pytest.mark.parametrize("polls", [True, False])
def test_an_engine_without_work_is_well_for_ever(rig: Rig, polls: bool) -> None:
    rig.look_for(10 * STALL_TIMEOUT_S, polls=polls)
    assert rig.watchdog.is_well


@pytest.mark.parametrize(
    ("hangs", "part", "goes_on"),
    [
        ((), "the engine's step", {"polls": False}),
        (("forward",), "stream forward", {}),
        (("forward", "sending"), "stream forward", {"sends": True}),
        (("sending",), "stream sending", {"layers": 1}),
    ],
    ids=["a step", "a forward while steps go on", "a forward while copies go on", "a copy while forwards go on"],
)
def test_what_hangs_stalls_though_others_go_on(
    rig: Rig, hangs: tuple[str, ...], part: str, goes_on: dict[str, int]
) -> None:
    rig.engine.is_stepping = not hangs
    for name in hangs:
        rig.hang(rig.forward if name == "forward" else rig.sending)
    assert_stalls(rig, part, **goes_on)


def test_a_copy_that_waits_for_a_long_forward_does_not_stall(rig: Rig) -> None:
    rig.hang(rig.forward)
    rig.sending.wait(rig.forward.record())
    rig.hang(rig.sending)
    rig.look_for(10 * STALL_TIMEOUT_S, layers=1)
    assert rig.watchdog.is_well


def test_a_forward_may_take_long_while_its_layers_go_on_and_so_may_the_step_that_waits_for_it(rig: Rig) -> None:
    rig.engine.is_stepping = True
    rig.hang(rig.forward)
    for _ in range(100):  # each layer takes three seconds
        rig.look_for(3, polls=False)
        rig.num_layers += 1
    assert rig.watchdog.is_well
    assert_stalls(rig, "stream forward", polls=False)


def test_a_step_that_waits_for_streams_which_go_on_does_not_stall(rig: Rig) -> None:
    rig.engine.is_stepping = True
    rig.hang(rig.sending)
    rig.look_for(10 * STALL_TIMEOUT_S, polls=False, sends=True)
    assert rig.watchdog.is_well


def test_what_moves_again_is_well_again(rig: Rig) -> None:
    rig.hang(rig.forward)
    with capture_logs() as lines:
        rig.look_for(STALL_TIMEOUT_S - 1)
        assert not rig.watchdog.is_well
        rig.forward.run_all()
        rig.look_for(LOOK_INTERVAL_S)
    assert rig.watchdog.is_well
    told = [("engine_stalled", UNREADY_AFTER_S), ("engine_moves_again", STALL_TIMEOUT_S - 1)]
    assert [(line["event"], line["still_s"]) for line in lines] == told
    rig.hang(rig.forward)
    assert_stalls(rig, "stream forward")


def test_time_in_which_the_process_itself_stood_still_does_not_count(rig: Rig) -> None:
    rig.engine.is_stepping = True
    rig.hang(rig.forward)
    rig.look_for(1, polls=False)
    rig.now_s += 3600
    rig.watchdog.look()
    assert rig.watchdog.is_well
    rig.look_for(JUST_BEFORE_S, polls=False)
    assert not rig.watchdog.is_well


def test_a_dead_engine_is_lost_at_the_next_look(rig: Rig) -> None:
    rig.engine.is_alive = False
    assert not rig.watchdog.is_well
    rig.watchdog.look()
    assert type(rig.watchdog.lost) is EngineLost
    assert "died" in str(rig.watchdog.lost)


def test_a_stream_that_failed_loses_the_engine(rig: Rig) -> None:
    def fails() -> None:
        raise ValueError("no such kernel")

    rig.forward.enqueue(fails)
    rig.forward.run_next()
    rig.watchdog.look()
    assert str(rig.watchdog.lost) == "stream forward failed: ValueError: no such kernel"


@dataclass
class Ranks:
    """The other ranks of a model that is cut."""

    loss: str | None = None
    behind: str = ""


def test_a_rank_that_ended_loses_the_engine(rig: Rig) -> None:
    ranks = Ranks()
    rig.watchdog = rig.watch(rig.engine, ranks)
    rig.look_for(1)
    assert rig.watchdog.is_well
    ranks.loss = "rank 1 of 2 (process 7) was killed by SIGKILL"
    rig.watchdog.look()
    assert type(rig.watchdog.lost) is EngineLost and str(rig.watchdog.lost) == ranks.loss


def test_a_stall_names_the_rank_that_others_wait_for(rig: Rig) -> None:
    rig.watchdog = rig.watch(rig.engine, Ranks(behind="rank 1 (process 7)"))
    rig.hang(rig.forward)
    rig.look_for(STALL_TIMEOUT_S + 1)
    assert str(rig.watchdog.lost).endswith(f"has not moved for {STALL_TIMEOUT_S} s, and waits for rank 1 (process 7)")


class HangingEngine:
    """An engine whose step hangs until the test ends it. It does not wait for the device."""

    def __init__(self) -> None:
        self.has_begun, self.goes_on = threading.Event(), threading.Event()

    def step(self, commands: Sequence[str]) -> None:
        if commands:
            self.has_begun.set()
            assert self.goes_on.wait(BOUND_S)

    def idle_timeout_s(self) -> float:
        return 10 * BOUND_S

    def be_woken_by(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def load(self) -> EngineLoad:
        return EngineLoad(PoolCounts(0, 0), PoolCounts(0, 0), num_queued=0, num_running=0, num_steps=0)

    def close(self) -> None:
        pass


def test_an_engine_thread_tells_a_step_that_hangs_from_waiting_for_commands(rig: Rig) -> None:
    engine = HangingEngine()
    inbox: EngineInbox[str] = EngineInbox()
    thread = EngineThread(inbox=inbox, engine=engine, on_death=lambda error: None, name="engine")
    thread.start()
    watchdog = rig.watch(thread)
    inbox.post("hang")
    assert engine.has_begun.wait(BOUND_S)
    rig.look_at(watchdog, JUST_BEFORE_S)
    assert watchdog.is_well
    rig.look_at(watchdog, SOON_AFTER_S)
    assert not watchdog.is_well

    engine.goes_on.set()
    give_up_s = time.monotonic() + BOUND_S
    while thread.is_stepping:
        assert time.monotonic() < give_up_s
    rig.look_at(watchdog, STALL_TIMEOUT_S)
    assert watchdog.is_well
    assert thread.stop(BOUND_S)


async def test_who_follows_hears_of_the_loss_once(rig: Rig) -> None:
    heard: list[EngineLost] = []
    following = asyncio.create_task(rig.watchdog.follow(heard.append))
    rig.engine.is_alive = False

    async with asyncio.timeout(BOUND_S):
        await following

    assert heard == [rig.watchdog.lost]
    rig.engine.is_alive = True
    rig.watchdog.look()
    assert not rig.watchdog.is_well


async def test_an_engine_that_cannot_be_watched_is_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[EngineLost] = []
    monkeypatch.setattr(rig.device, "progress", None)

    async with asyncio.timeout(BOUND_S):
        await rig.watchdog.follow(heard.append)

    assert heard == [rig.watchdog.lost]
    assert "cannot be watched" in str(rig.watchdog.lost)
