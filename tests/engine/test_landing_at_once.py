"""On devices where a copy's first part runs on the engine's own thread, landing KV delays each launch by one segment at
most.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from decode_service.messages import SegmentsLanded
from decode_service.speculate.spec_info import SpecInfo
from tests.engine.harness import ScriptedEngine
from tests.engine.speculating import CHAIN
from tests.engine.tags import GROUP
from tests.support.scripted_device import Observer, ScriptedDevice, ScriptedStream, run_nothing

NUM_REQUESTS = 7
NUM_SEGMENTS = 2  # of each request's KV of a layer group


class Launches(Observer):
    """Records the names of what the engine's thread launches, in order, with "step" at the start of each step."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextlib.contextmanager
    def launching(self, stream: ScriptedStream, name: str) -> Iterator[None]:
        self.names.append(name)
        yield

    def step(self) -> list[str]:
        """Returns the launches of the last step."""
        last = len(self.names) - 1 - self.names[::-1].index("step")
        return self.names[last + 1 :]


def running_beside_a_queue(
    on_host_call: Callable[[ScriptedDevice], None], spec_info: SpecInfo | None
) -> tuple[ScriptedEngine, Launches]:
    """Returns an engine in which one request decodes while the KV of all others arrives at once, and a record of its
    launches.
    """
    launches = Launches()
    device = ScriptedDevice(runs_pieces_beside=False, observer=launches)
    scripted = ScriptedEngine(device=device, max_rows=8, max_kv_tokens=400, spec_info=spec_info)
    scripted.submit("runs", [1, 2, 3], 30)
    while not scripted.engine.load().num_running:
        scripted.step_and_hand_over()
        device.run_all()
    for number in range(NUM_REQUESTS):
        scripted.submit(str(number), [number + 4, 9, 8, 7], 5)
    scripted.step_and_hand_over()
    if on_host_call is not run_nothing:
        device.run_all()
    device.on_host_call = on_host_call
    return scripted, launches


@pytest.mark.parametrize("spec_info", [None, CHAIN], ids=["plain", "chain"])
def test_a_device_that_waits_for_a_launch_waits_for_one_copy_at_most(spec_info: SpecInfo | None) -> None:
    """The device of this test finishes each launch at once, so it always waits for the next one."""
    scripted, launches = running_beside_a_queue(ScriptedDevice.run_all, spec_info)
    num_landed = 0
    while any(not outcome.has_ended for outcome in scripted.outcomes.values()):
        launches.names.append("step")
        scripted.step()
        names = launches.step()
        assert names.count("land") <= 1
        assert "land" not in names or names[-1] == "land", "it was copied before the launch"
        num_landed += names.count("land")
    assert num_landed == NUM_REQUESTS * NUM_SEGMENTS * (1 if spec_info is None else 2)
    for outcome in scripted.outcomes.values():
        assert outcome.token_ids == outcome.expected


@pytest.mark.parametrize("spec_info", [None, CHAIN], ids=["plain", "chain"])
def test_while_the_device_computes_everything_is_copied(spec_info: SpecInfo | None) -> None:
    scripted, launches = running_beside_a_queue(run_nothing, spec_info)
    launches.names.append("step")
    scripted.step()
    names = launches.step()
    assert names.count("land") == NUM_REQUESTS * NUM_SEGMENTS * (1 if spec_info is None else 2)
    if spec_info is None:
        assert names[: names.index("land")].count("verify") == 1, "it was copied before the launch"
    scripted.run(advance=ScriptedDevice.run_all)
    for outcome in scripted.outcomes.values():
        assert outcome.token_ids == outcome.expected


def test_an_engine_with_nothing_to_launch_goes_on_copying() -> None:
    scripted = ScriptedEngine(device=ScriptedDevice(runs_pieces_beside=False))
    outcome = scripted.submit("a", [1, 2, 3, 4], 3)
    scripted.step()
    scripted.hand_over("a")
    scripted.step()
    assert scripted.engine.idle_timeout_s() == 0.0, "a segment waits, and nobody would look"
    scripted.run()
    assert outcome.token_ids == outcome.expected


def test_kv_of_a_request_that_was_given_up_is_not_copied_and_its_bytes_return() -> None:
    scripted, launches = running_beside_a_queue(ScriptedDevice.run_all, None)
    scripted.step()
    launches.names.clear()
    for number in range(NUM_REQUESTS):
        scripted.abort(str(number))
    events = []
    while not scripted.outcomes["runs"].has_ended:
        events += scripted.step()
    assert "land" not in launches.names
    num_bytes = sum(event.num_bytes for event in events if isinstance(event, SegmentsLanded))
    assert num_bytes == NUM_REQUESTS * 4 * GROUP.token_bytes
    scripted.run()


def test_an_engine_tells_of_what_it_frees_before_it_waits() -> None:
    """The engine reports freed bytes before it waits, because a replica may be unable to send more until it hears of
    them.
    """
    scripted = ScriptedEngine(device=ScriptedDevice(runs_pieces_beside=False))
    scripted.submit("a", [1, 2, 3, 4], 3)
    scripted.step()
    scripted.hand_over("a")
    scripted.abort("a")
    num_bytes, waits_s = 0, []
    for _ in range(3):
        events = scripted.step()
        num_bytes += sum(event.num_bytes for event in events if isinstance(event, SegmentsLanded))
        if num_bytes:
            break
        waits_s.append(scripted.engine.idle_timeout_s())
    assert num_bytes == 4 * GROUP.token_bytes
    assert not any(waits_s), "it slept on bytes that a replica waits for"


def test_what_was_given_up_does_not_take_the_place_of_a_copy() -> None:
    """Every launch waits for one copy: that of the first segment still wanted, even if segments of abandoned requests
    come before it.
    """
    scripted, launches = running_beside_a_queue(ScriptedDevice.run_all, None)
    for number in range(NUM_REQUESTS - 1):
        scripted.abort(str(number))
    launches.names.append("step")
    scripted.step()
    assert launches.step().count("land") == 1
