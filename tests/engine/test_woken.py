"""The streams that an engine waits for wake it, so that it seldom needs to poll."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from common.attention.backend import ForwardInput
from common.model.forward_program import OnLayerKv
from common.model.target import TargetModel, TargetOutput
from common.sampling.params import ResolvedSampling
from common.service.engine_thread import EngineInbox, EngineThread
from common.telemetry.stats import EngineLoad, PoolCounts
from common.wire.handoff import Accepted, HandoffRow, KvSegment
from decode_service import messages as decode
from decode_service.messages import FrameArrived, Replica, ReplicasChanged, StartHandoff, Submit
from prefill_service.messages import Command, Event, FrameReady, OpenCall
from prefill_service.schedule.scheduler import PrefillEngine
from tests.engine.harness import ScriptedEngine
from tests.support.engines import Received, new_decode_engine, new_prefill_engine
from tests.support.scripted_device import ScriptedDevice

BOUND_S = 30.0
OFTEN_S = 0.001
PROMPT = (11, 12, 13)
SAMPLING = ResolvedSampling(seed=1, max_tokens=4)


def woken_prefill(
    tiny_target: Callable[[str], TargetModel], **options: object
) -> tuple[PrefillEngine, threading.Event]:
    """Returns a prefill engine of one row, and the event that is set when a stream wakes it."""
    engine = new_prefill_engine(tiny_target("llama"), max_rows=1, early_sending=False, **options)
    is_woken = threading.Event()
    engine.be_woken_by(is_woken.set)
    return engine, is_woken


class Sleeper:
    """An engine that never has anything to do."""

    def __init__(self) -> None:
        self.has_stepped = threading.Event()
        self.wake: Callable[[], None] = lambda: None

    def step(self, commands: Sequence[str]) -> None:
        self.has_stepped.set()

    def idle_timeout_s(self) -> float:
        return 10 * BOUND_S

    def be_woken_by(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def load(self) -> EngineLoad:
        return EngineLoad(PoolCounts(0, 0), PoolCounts(0, 0), num_queued=0, num_running=0, num_steps=0)

    def close(self) -> None:
        pass


def test_a_waiting_engine_steps_when_it_is_woken() -> None:
    engine = Sleeper()
    inbox: EngineInbox[str] = EngineInbox()
    thread = EngineThread(inbox=inbox, engine=engine, on_death=lambda error: None, name="engine")
    thread.start()
    try:
        for _ in range(3):
            assert not engine.has_stepped.is_set()
            engine.wake()
            assert engine.has_stepped.wait(BOUND_S)
            engine.has_stepped.clear()
    finally:
        assert thread.stop(BOUND_S)


class Taker(Sleeper):
    """An engine that records the commands of each step in `steps`. In its first step it calls `during_first`, in which
    a test posts and takes further commands.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Sequence[object]] = []
        self.during_first: Callable[[], None] = lambda: None

    def step(self, commands: Sequence[object]) -> None:
        self.steps.append(commands)
        if len(self.steps) == 1:
            self.during_first()
        else:
            self.has_stepped.set()


def test_an_engine_takes_some_commands_within_a_step_and_the_others_in_the_next() -> None:
    engine = Taker()
    inbox: EngineInbox[object] = EngineInbox()
    thread = EngineThread(inbox=inbox, engine=engine, on_death=lambda error: None, name="taker")
    taken: list[int] = []

    def post_and_take() -> None:
        for command in ("a", 1, "b", 2):
            inbox.post(command)
        taken.extend(inbox.take(int))
        inbox.post("c")

    engine.during_first = post_and_take
    inbox.post("first")
    thread.start()
    assert engine.has_stepped.wait(BOUND_S), "what was left was waited for"
    assert thread.stop(BOUND_S)
    assert taken == [1, 2] and engine.steps[:2] == [["first"], ["a", "b", "c"]]


def test_who_is_woken_in_a_step_that_takes_commands_steps_again_at_once() -> None:
    engine = Taker()
    inbox: EngineInbox[object] = EngineInbox()
    thread = EngineThread(inbox=inbox, engine=engine, on_death=lambda error: None, name="taker")

    def wake_and_take() -> None:
        engine.wake()
        assert inbox.take(int) == []

    engine.during_first = wake_and_take
    inbox.post("first")
    thread.start()
    assert engine.has_stepped.wait(BOUND_S), "what woke it was taken with the commands"
    assert thread.stop(BOUND_S)


def test_prefill_is_woken_when_a_forward_ends_and_when_its_kv_is_copied(
    tiny_target: Callable[[str], TargetModel],
) -> None:
    received: Received[Event] = Received()
    engine, is_woken = woken_prefill(tiny_target, outbox=received)
    commands = [OpenCall("call", (HandoffRow("a", 0, PROMPT, len(PROMPT), SAMPLING),))]
    frames: list[object] = []
    while True:
        engine.step(commands)
        frames += [event.frame for event in received.take() if isinstance(event, FrameReady)]
        if any(isinstance(frame, KvSegment) for frame in frames):
            break
        commands = []
        assert engine.idle_timeout_s() > OFTEN_S
        assert is_woken.wait(BOUND_S), f"nobody tells that there is more than {frames}"
        is_woken.clear()
    engine.close()


def test_decode_is_woken_when_kv_has_landed(tiny_target: Callable[[str], TargetModel]) -> None:
    target = tiny_target("llama")
    received: Received[decode.Event] = Received()
    engine = new_decode_engine(target, outbox=received, max_rows=1)
    is_woken = threading.Event()
    engine.be_woken_by(is_woken.set)
    engine.step([ReplicasChanged((Replica("there", is_ready=True),)), Submit("a", PROMPT, len(PROMPT), SAMPLING)])
    (call,) = [event for event in received.take() if isinstance(event, StartHandoff)]
    group = target.layer_group
    payload = bytes(group.num_layers * len(PROMPT) * group.layer_token_bytes)
    segment = KvSegment(0, group.name, 0, group.num_layers, 0, len(PROMPT), payload)
    assert not is_woken.is_set()
    engine.step([FrameArrived(call.call_id, frame) for frame in (Accepted("there"), segment)])
    assert engine.idle_timeout_s() > OFTEN_S
    assert is_woken.wait(BOUND_S)
    engine.close()


def test_a_queued_prompt_does_not_wait_for_the_row_that_a_step_freed(
    tiny_target: Callable[[str], TargetModel],
) -> None:
    engine, is_woken = woken_prefill(tiny_target)
    commands: list[Command] = [
        OpenCall("call", tuple(HandoffRow(name, 0, PROMPT, len(PROMPT), SAMPLING) for name in "ab"))
    ]
    waits_s: list[float] = []
    while engine.load().num_queued or not waits_s:
        engine.step(commands)
        commands = []
        if engine.load().num_queued and engine.load().rows.free:
            waits_s.append(engine.idle_timeout_s())
        elif engine.load().num_queued:
            assert is_woken.wait(BOUND_S)
            is_woken.clear()
    assert waits_s == [0.0]
    engine.close()


def test_who_was_short_of_slots_does_not_wait_for_those_that_a_step_freed() -> None:
    """A forward's end frees slots, and nothing reports it, because the engine itself waited for that end. The engine
    must then step again at once.
    """
    scripted = ScriptedEngine(max_rows=2, max_kv_tokens=48)
    for number in range(2):
        scripted.submit(str(number), [number + 1, 7], 30)
    waits_s: list[float] = []

    def advance(device: ScriptedDevice) -> None:
        load = scripted.engine.load()
        if load.num_running and load.slots.free and not scripted.forward.pending():
            waits_s.append(scripted.engine.idle_timeout_s())
        scripted.landing.run_all()

    scripted.run(advance=advance)
    assert scripted.engine.load().num_retractions > 0 and waits_s, "nothing was short"
    assert set(waits_s) == {0.0}


def test_what_a_step_is_done_with_is_let_go_of_behind_its_end() -> None:
    """The engine frees a step's tensors when it takes the step's results. If the stream freed them, it would pause
    between two forwards.
    """
    scripted = ScriptedEngine()
    scripted.submit("a", [1, 2], 5)
    outputs: list[weakref.ref[Tensor]] = []
    forward = scripted.model.forward

    def noted(batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> TargetOutput:
        output = forward(batch, on_layer_kv=on_layer_kv)
        outputs.append(weakref.ref(output.logits))
        return output

    scripted.model.forward = noted  # type: ignore[method-assign]
    scripted.start("a")
    scripted.forward.run_all()
    assert outputs[0]() is not None
    scripted.step()
    gc.collect()
    assert outputs[0]() is None, "and no later"
