"""Tests that where the engine's thread launches every kernel itself, sending KV does not wait for the launch of a whole
forward.

A driver queues some thousand launches ahead of the device. After that, each launch takes as long as the device
computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from common.attention.backend import ForwardInput
from common.device.stream import DeviceLost, PieceFailed
from common.errors import RowFailure
from common.kv.kv_shard import OneDevice
from common.kv.layer_group import LayerGroupSpec
from common.kv.pool import KvPool
from common.model.forward_program import OnLayerKv
from common.model.target import TargetModel, TargetOutput
from common.prompts.chunk_batch import Chunk
from common.sampling.params import ResolvedSampling
from common.wire.handoff import HandoffRow, KvSegment
from prefill_service.handoff.sender import KvSender
from prefill_service.messages import BytesSent, Event, FrameReady, OpenCall
from prefill_service.prompt import Prompt
from tests.support.engines import PrefillHalf, handoff_rows
from tests.support.faulty_target import FaultyTarget, ForwardFailed
from tests.support.scripted_device import Observer, ScriptedDevice, ScriptedStream

NUM_LAYERS = 2
KERNELS_PER_LAYER = 1000
DRIVERS_QUEUE = 1024
PROMPT_TOKENS = 8


class LaunchQueue(Observer):
    """A driver's launch queue. `journal` lists pairs: what was launched, and the number of kernels for whose end the
    host had waited by then.
    """

    def __init__(self) -> None:
        self._num_launched = 0
        self.num_waited = 0
        self.journal: list[tuple[str, int]] = []

    def launch(self, num_kernels: int) -> None:
        self._num_launched += num_kernels
        self.num_waited = max(self.num_waited, self._num_launched - DRIVERS_QUEUE)

    def note(self, what: str) -> None:
        self.journal.append((what, self.num_waited))

    @contextlib.contextmanager
    def launching(self, stream: ScriptedStream, name: str) -> Iterator[None]:
        if name != "forward":
            self.note(name)
        yield

    def waited_before(self, what: str, number: int = 0) -> int:
        return [num_waited for name, num_waited in self.journal if name == what][number]


class LaunchedTarget(FaultyTarget):
    """A target whose layers each launch a number of kernels. If `fails_in` is the number of a forward, that forward
    fails after its first layer.
    """

    def __init__(self, sound: TargetModel, queue: LaunchQueue) -> None:
        super().__init__(sound)
        self._queue = queue
        self._num_forwards = 0
        self.fails_in: int | None = None

    def forward(self, batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> TargetOutput:
        number, self._num_forwards = self._num_forwards, self._num_forwards + 1

        def tell(layer: int) -> None:
            self._queue.launch(KERNELS_PER_LAYER)
            self._queue.note(f"forward {number}, layer {layer}")
            if on_layer_kv is not None and layer in on_layer_kv:
                on_layer_kv[layer]()
            if number == self.fails_in:
                raise ForwardFailed("planted")

        return super().forward(batch, on_layer_kv={layer: partial(tell, layer) for layer in range(NUM_LAYERS)})


class Rig(PrefillHalf):
    """A prefill engine on a LaunchedTarget. At most `num_unsent` segments may be unsent at a time."""

    def __init__(self, target: TargetModel, *, early_sending: bool = True, num_unsent: int = 64) -> None:
        self.segment_bytes = target.layer_group.layer_token_bytes * PROMPT_TOKENS
        self.queue = LaunchQueue()
        self.device = ScriptedDevice(runs_pieces_beside=False, observer=self.queue)
        self.target = LaunchedTarget(target, self.queue)
        self._sent: list[BytesSent] = []
        super().__init__(
            self.target,
            self.device,
            chunk_tokens=PROMPT_TOKENS,
            max_batch_tokens=PROMPT_TOKENS,  # so that each forward holds one prompt
            max_segment_bytes=self.segment_bytes,
            send_budget_bytes=num_unsent * self.segment_bytes,
            early_sending=early_sending,
            returned=self.returned,
        )

    def open_each(self, *names: str, num_tokens: int = PROMPT_TOKENS) -> None:
        """Opens a call with one prompt for each name, one after the other, with a step after each."""
        for name in names:
            self.open(name, [range(5, 5 + num_tokens)])

    def take(self, events: Sequence[Event]) -> None:
        super().take(events)
        for event in events:
            if isinstance(event, FrameReady):
                self.queue.note(f"{type(event.frame).__name__} of {event.call_id}")
                if isinstance(event.frame, KvSegment):
                    self._sent.append(BytesSent(event.call_id, event.frame.num_bytes))

    def returned(self) -> list[BytesSent]:
        """Returns the BytesSent commands for all segments that came since the last call."""
        sent, self._sent = self._sent, []
        return sent

    def run(self) -> None:
        for _ in range(50):
            if self.is_empty:
                return
            self.device.run_all()
            self.step(*self.returned())
        raise AssertionError(f"not over: {self.engine.load()}")


@pytest.fixture
def make_rig(tiny_target: Callable[[str], TargetModel]) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(tiny_target("llama"), **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def open_two(rig: Rig) -> None:
    """Launches two forwards in one step. Whenever the engine polls the device, the device has done all it can."""
    rig.device.on_host_call = ScriptedDevice.run_all
    rig.step(*(OpenCall(name, handoff_rows([range(5, 5 + PROMPT_TOKENS)])) for name in ("x", "y")))


def test_a_layers_copy_starts_once_the_layer_is_launched(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    open_two(rig)
    names = [name for name, _ in rig.queue.journal]
    assert names[names.index("forward 0, layer 0") + 1] == "copy_out"
    for layer in range(NUM_LAYERS):
        waited = rig.queue.waited_before(f"forward 0, layer {layer}")
        assert rig.queue.waited_before("copy_out", layer) == waited
    rig.run()


def test_frames_and_first_tokens_are_delivered_between_the_layers_of_the_next_forward(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig()
    open_two(rig)
    names = [name for name, _ in rig.queue.journal]
    last = names.index("forward 1, layer 1")
    assert names[:last].count("KvSegment of x") == NUM_LAYERS
    assert names[:last].count("PrebuiltBatch of x") == 1
    rig.run()


def test_bytes_that_were_taken_make_room_within_the_same_launch(make_rig: Callable[..., Rig]) -> None:
    """Only one segment may be unsent in this test, and each forward has one segment per layer."""
    rig = make_rig(num_unsent=1)
    open_two(rig)
    names = [name for name, _ in rig.queue.journal]
    assert names[: names.index("forward 1, layer 0")].count("copy_out") == NUM_LAYERS
    assert names[: names.index("forward 1, layer 1") + 1].count("KvSegment of x") == NUM_LAYERS
    rig.run()


def test_without_early_sending_a_forwards_kv_leaves_behind_it_and_during_the_next_launch(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(early_sending=False)
    open_two(rig)
    names = [name for name, _ in rig.queue.journal]
    assert "copy_out" not in names[: names.index("forward 0, layer 1") + 1]
    assert "copy_out" in names[: names.index("forward 1, layer 1")]
    rig.run()


@pytest.mark.parametrize("early_sending", [True, False])
def test_all_kv_is_sent_once(early_sending: bool, make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(early_sending=early_sending)
    rig.device.on_host_call = ScriptedDevice.run_all
    rig.open_each("x", num_tokens=2 * PROMPT_TOKENS)
    rig.open_each("y")
    rig.run()
    for call, num_tokens in (("x", 2 * PROMPT_TOKENS), ("y", PROMPT_TOKENS)):
        times = np.zeros((NUM_LAYERS, num_tokens), dtype=np.int64)
        for event in rig.frames:
            if event.call_id == call and isinstance(segment := event.frame, KvSegment):
                layers = slice(segment.layer_start, segment.layer_start + segment.num_layers)
                times[layers, segment.token_start : segment.token_start + segment.num_tokens] += 1
        assert (times == 1).all()
    assert len(rig.first_tokens) == 2


def test_a_forward_that_fails_while_the_next_is_launched_fails_its_row_behind_that(
    make_rig: Callable[..., Rig],
) -> None:
    """The next forward belongs to the same prompt, and still writes to its row."""
    rig = make_rig()
    rig.target.fails_in = 0
    rig.device.on_host_call = ScriptedDevice.run_all
    rig.open_each("x", num_tokens=2 * PROMPT_TOKENS)
    rig.run()
    (failed,) = rig.failures
    assert failed.reason is RowFailure.COMPUTE and failed.retryable


class CountedBytes(int):
    """A number of bytes. `num_added` counts how often any such number was added to another number or to a sum."""

    num_added = 0

    def __mul__(self, other: int) -> CountedBytes:
        return CountedBytes(int(self) * other)

    def __add__(self, other: int) -> CountedBytes:
        CountedBytes.num_added += 1
        return CountedBytes(int(self) + other)

    __radd__ = __add__


@dataclass(frozen=True, slots=True)
class CountedGroup(LayerGroupSpec):
    @property
    def layer_token_bytes(self) -> int:
        return CountedBytes(self.num_planes * self.row_bytes)


def additions_while_layers_are_sent(num_calls: int, *, num_segments: int) -> int:
    """Sends a forward's layers for `num_calls` calls of one prompt each, with `num_segments` unsent segments per call.
    Returns the number of additions of byte counts.
    """
    group = CountedGroup("target", num_layers=8, num_planes=2, num_heads=1, head_dim=2, dtype="float32")
    device = ScriptedDevice()
    pool = KvPool(
        groups=[group],
        max_rows=num_calls,
        max_kv_tokens=num_calls,
        max_tokens_per_row=1,
        tensors=OneDevice(device.torch_device),
    )
    segment_bytes = int(group.layer_token_bytes)
    budget_bytes = num_calls * num_segments * segment_bytes
    sender = KvSender(device=device, pool=pool, memory=None, budget_bytes=budget_bytes, max_segment_bytes=segment_bytes)
    chunks = []
    for number in range(num_calls):
        row = HandoffRow(str(number), 0, (5,), 1, ResolvedSampling(seed=1, max_tokens=4))
        sender.open_call(f"call {number}", shares_memory=False)
        prompt = Prompt(f"call {number}", 0, row, arrived_s=0.0, due_s=0.0, best_level=0, lease=pool.reserve(1))
        chunks.append(Chunk(prompt, 0, 1))
    CountedBytes.num_added = 0
    for layer in range(group.num_layers):
        sender.queue_layers(chunks, group, range(layer, layer + 1), device.schedule_stream.record())
        sender.start_copies()
    assert sender.unsent_bytes == budget_bytes
    return CountedBytes.num_added


@pytest.mark.parametrize("num_segments", [1, 3])
def test_what_a_layer_costs_grows_with_the_calls_and_not_with_their_square(num_segments: int) -> None:
    few, many = (additions_while_layers_are_sent(number, num_segments=num_segments) for number in (8, 64))
    assert many <= 8 * few


def test_a_device_that_is_lost_meanwhile_ends_the_engine(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.device.on_host_call = ScriptedDevice.run_all

    def lose(*_: object) -> Tensor:
        raise DeviceLost("the device faulted")

    rig.device.host_buffer = lose  # type: ignore[method-assign]
    with pytest.raises((DeviceLost, PieceFailed)):
        rig.open_each("x")
