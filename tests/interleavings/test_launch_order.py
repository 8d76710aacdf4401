"""Tests that unordered accesses, and memory freed too early, are found on a device that runs pieces (units of stream
work) when they are enqueued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from common.kv.kv_shard import OneDevice
from common.kv.pool import KvPool
from common.model.forward_graphs import ForwardGraphs
from common.sampling.state import SamplingState
from decode_service.forward.drafter import NoDrafter
from decode_service.forward.forward_side import record_forwards
from decode_service.forward.future_map import FutureMap
from decode_service.forward.worker import Worker
from decode_service.speculate.spec_info import NO_DRAFTS, SpecInfo
from tests.engine.mutants import memory
from tests.engine.speculating import CHAIN, NOTHING, SEED, TREE
from tests.engine.tags import GROUP, VOCAB_SIZE, TagModel
from tests.interleavings import scenarios
from tests.interleavings.explorer import Script, replay
from tests.interleavings.footprint import Shared
from tests.interleavings.launch_order import LaunchOrder
from tests.interleavings.scenarios import Scenario, shared_by
from tests.support.recording_device import CallRecorder
from tests.support.scripted_device import ScriptedDevice, ScriptedStream

BOUND_S = 1.0


class Rig:
    """A device with two streams, and its schedule side."""

    def __init__(self) -> None:
        self.order = LaunchOrder()
        self.device = ScriptedDevice(runs_pieces_beside=False, observer=self.order)
        self.schedule = self.device.schedule_stream
        self.forward, self.copy = (self.device.new_stream(name) for name in ("forward", "copy"))

    def read(self, stream: ScriptedStream, tensor: Tensor, name: str = "read") -> None:
        def piece() -> None:
            tensor.sum()

        piece.__name__ = name
        stream.enqueue(piece)

    @contextmanager
    def watching(self, *buffers: Shared) -> Iterator[None]:
        with self.order.watching(buffers):
            yield
        self.order.check()


Use = Callable[[Rig], None]


def dropped_behind_a_launch(rig: Rig) -> None:
    tensor = torch.zeros(3)
    rig.forward.wait(rig.schedule.record())
    rig.read(rig.forward, tensor)


def dropped_while_another_step_is_waited_for(rig: Rig) -> None:
    tensor = torch.zeros(3)
    rig.forward.wait(rig.schedule.record())
    before = rig.forward.record()
    rig.read(rig.forward, tensor)
    before.synchronize(BOUND_S)


def dropped_behind_its_end(rig: Rig) -> None:
    tensor = torch.zeros(3)
    rig.forward.wait(rig.schedule.record())
    rig.read(rig.forward, tensor)
    rig.forward.record().synchronize(BOUND_S)


def dropped_where_the_schedule_side_waits(rig: Rig) -> None:
    tensor = torch.zeros(3)
    rig.forward.wait(rig.schedule.record())
    rig.read(rig.forward, tensor)
    rig.schedule.wait(rig.forward.record())


def made_behind_what_is_waited_for(rig: Rig) -> None:
    event = rig.schedule.record()
    tensor = torch.zeros(3)
    rig.forward.wait(event)
    rig.read(rig.forward, tensor)
    rig.forward.record().synchronize(BOUND_S)


def only_taken_behind_what_is_waited_for(rig: Rig) -> None:
    """Allocates a tensor after the event that the forward waits for, and lets only the forward write it. This is no
    race: whatever used that memory before ended before the event.
    """
    torch.zeros(3)
    event = rig.schedule.record()
    tensor = torch.empty(3)
    rig.forward.wait(event)
    rig.forward.enqueue(lambda: tensor.fill_(1))
    rig.forward.record().synchronize(BOUND_S)


def taken_behind_work_that_is_not_waited_for(rig: Rig) -> None:
    """Allocates a tensor after work that comes after the event, and lets the forward write it. This is a race: that
    work may still use the memory, and the forward does not wait for it.
    """
    event = rig.schedule.record()
    torch.zeros(3)
    tensor = torch.empty(3)
    rig.forward.wait(event)
    rig.forward.enqueue(lambda: tensor.fill_(1))
    rig.forward.record().synchronize(BOUND_S)


def made_and_dropped_by_a_stream(rig: Rig) -> None:
    rig.forward.enqueue(lambda: torch.zeros(3).sum())


def made_by_a_stream_and_read_by_another(rig: Rig) -> None:
    made: list[Tensor] = []
    rig.forward.enqueue(lambda: made.append(torch.zeros(3)))
    rig.read(rig.copy, made[0])
    rig.copy.record().synchronize(BOUND_S)


def made_by_a_stream_and_dropped_under_another(rig: Rig) -> None:
    made: list[Tensor] = []
    rig.forward.enqueue(lambda: made.append(torch.zeros(3)))
    rig.copy.wait(rig.forward.record())
    rig.read(rig.copy, made[0])


def read_by_the_host_behind_an_event(rig: Rig) -> None:
    made: list[Tensor] = []
    rig.forward.enqueue(lambda: made.append(torch.zeros(3)))
    rig.forward.record().synchronize(BOUND_S)
    made[0].tolist()


def read_by_the_host_too_early(rig: Rig) -> None:
    made: list[Tensor] = []
    rig.forward.enqueue(lambda: made.append(torch.zeros(3)))
    made[0].tolist()
    rig.forward.record().synchronize(BOUND_S)


def read_behind_a_milestone(rig: Rig) -> None:
    made: list[Tensor] = []

    def layers(milestones: list[Callable[[], None]]) -> None:
        made.append(torch.zeros(3))
        milestones[0]()
        made.append(torch.zeros(3))

    (written,) = rig.forward.enqueue_with_milestones(layers, 1)  # type: ignore[arg-type]
    rig.copy.wait(written)
    rig.read(rig.copy, made[0])
    rig.copy.record().synchronize(BOUND_S)


def read_that_comes_behind_a_milestone(rig: Rig) -> None:
    made: list[Tensor] = []

    def layers(milestones: list[Callable[[], None]]) -> None:
        milestones[0]()
        made.append(torch.zeros(3))

    (written,) = rig.forward.enqueue_with_milestones(layers, 1)  # type: ignore[arg-type]
    rig.copy.wait(written)
    rig.read(rig.copy, made[0])
    rig.copy.record().synchronize(BOUND_S)


@pytest.mark.parametrize(
    ("use", "is_right"),
    [
        (dropped_behind_a_launch, False),
        (dropped_while_another_step_is_waited_for, False),
        (dropped_behind_its_end, True),
        (dropped_where_the_schedule_side_waits, True),
        (made_behind_what_is_waited_for, False),
        (only_taken_behind_what_is_waited_for, True),
        (taken_behind_work_that_is_not_waited_for, False),
        (made_and_dropped_by_a_stream, True),
        (made_by_a_stream_and_read_by_another, False),
        (made_by_a_stream_and_dropped_under_another, False),
        (read_by_the_host_behind_an_event, True),
        (read_by_the_host_too_early, False),
        (read_behind_a_milestone, True),
        (read_that_comes_behind_a_milestone, False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_memory_that_streams_share_is_ordered_or_is_found(use: Use, is_right: bool) -> None:
    rig = Rig()
    if is_right:
        with rig.watching():
            use(rig)
        return
    with pytest.raises(AssertionError, match="a race for"), rig.watching():
        use(rig)


@pytest.mark.parametrize("is_apart", [True, False])
def test_a_buffer_is_told_apart_by_its_rows(is_apart: bool) -> None:
    rig, table = Rig(), torch.zeros((4, 2))

    def both_write() -> None:
        rig.forward.enqueue(lambda: table[1].fill_(1))
        rig.copy.enqueue(lambda: table[2 if is_apart else 1].fill_(2))

    if is_apart:
        with rig.watching(Shared("table", table, 0)):
            both_write()
        return
    race = r"a race for \('table', 1\): forward .* and copy"
    with pytest.raises(AssertionError, match=race), rig.watching(Shared("table", table, 0)):
        both_write()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("spec_info", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_an_engine_has_its_memory_in_order(spec_info: SpecInfo | None, overlap: bool) -> None:
    scenario = Scenario(scenarios.two_requests, 2, 80, spec_info, overlap=overlap, at_once=True)
    assert replay(scenario.program, Script(())) is None


SOME_WITHOUT_DRAFTS = (NOTHING, SEED, CHAIN)


def test_steps_without_drafts_of_an_engine_that_drafts_have_their_memory_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = Scenario(scenarios.two_requests, 2, 80, CHAIN, depths=SOME_WITHOUT_DRAFTS, at_once=True)
    assert replay(scenario.program, Script(())) is None
    memory.tokens_dropped_at_launch(monkeypatch)
    assert "a race for (('schedule', " in str(replay(scenario.program, Script(())))


COLUMNS = [
    (None, "req_pool_indices"),
    (None, "seq_lens"),
    (None, "out_cache_loc"),
    (CHAIN, "req_pool_indices"),
    (CHAIN, "prefix_lens"),
    (CHAIN, "positions"),
    (CHAIN, "out_cache_loc"),
]


@pytest.mark.parametrize(("spec_info", "column"), COLUMNS)
def test_a_step_holds_each_tensor_that_its_pieces_read(
    spec_info: SpecInfo | None, column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.dropped_at_launch(column)(monkeypatch)
    scenario = Scenario(scenarios.one_request, 1, 24, spec_info, at_once=True)
    assert "a race for (('schedule', " in str(replay(scenario.program, Script(())))


def test_what_recording_runs_is_made_before_it_is_waited_for() -> None:
    """The work to be recorded reads padding batches, which the schedule side makes. All of them must be made before the
    forward stream waits for the schedule side.
    """
    rig = Rig()
    cpu = torch.device("cpu")
    pool = KvPool(groups=[GROUP], max_rows=3, max_kv_tokens=16, max_tokens_per_row=16, tensors=OneDevice(cpu))
    sampling_state = SamplingState(max_rows=3, vocab_size=VOCAB_SIZE, torch_device=cpu)
    future_map = FutureMap(
        device=rig.device,
        forward_stream=rig.forward,
        max_rows=3,
        vocab_size=VOCAB_SIZE,
        relays_lengths=False,
        seed_columns=(),
        poisons_consumed_rows=False,
        wait_timeout_s=BOUND_S,
    )
    worker = Worker(
        model=TagModel(),
        drafter=NoDrafter(),
        device=rig.device,
        pool=pool,
        sampling_state=sampling_state,
        stream=rig.forward,
        speculates=False,
    )
    with rig.watching(*shared_by(pool, future_map, sampling_state)):
        record_forwards(
            worker,
            ForwardGraphs(recorder=CallRecorder(), batch_sizes=(1, 3)),
            spec_infos=[NO_DRAFTS],
            future_map=future_map,
            device=rig.device,
            stream=rig.forward,
            timeout_s=BOUND_S,
        )
