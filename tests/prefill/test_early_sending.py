"""Tests that the KV of a chunk's first layers is sent while its later layers are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch

from common.attention.backend import ForwardInput
from common.errors import RowFailure
from common.model.forward_program import OnLayerKv
from common.model.target import TargetModel, TargetOutput
from common.wire.handoff import KvSegment, PrebuiltBatch
from prefill_service.messages import BytesSent, OpenCall
from tests.engine.tag_head import TagHead
from tests.engine.tags import TagModel
from tests.support.engines import PrefillHalf, handoff_rows
from tests.support.faulty_target import FaultyTarget, ForwardFailed
from tests.support.scripted_device import ScriptedDevice

PROMPTS = ((11, 12, 13, 14, 15, 16, 17), (21, 22, 23))
CHUNK_TOKENS = 4
NUM_LAYERS = 2


class WatchedTarget(FaultyTarget):
    """A target that records in the journal when a forward ends. `fails_behind` = (forward, layer) makes that forward
    fail once that layer's KV is written.
    """

    def __init__(self, sound: TargetModel, journal: list[str]) -> None:
        super().__init__(sound)
        self._journal = journal
        self.fails_behind: tuple[int, int] | None = None
        self.num_forwards = 0

    def forward(self, batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> TargetOutput:
        number, self.num_forwards = self.num_forwards, self.num_forwards + 1

        def tell(layer: int) -> None:
            if on_layer_kv is not None and layer in on_layer_kv:
                on_layer_kv[layer]()
            if self.fails_behind == (number, layer):
                raise ForwardFailed("planted")

        output = super().forward(batch, on_layer_kv={layer: partial(tell, layer) for layer in range(NUM_LAYERS)})
        self._journal.append("forward ended")
        return output


class TagTarget(TagModel):
    """A tag model that records in the journal when a forward ends, and returns the states that a TagHead reads."""

    def __init__(self, journal: list[str]) -> None:
        super().__init__()
        self._journal = journal

    def forward(self, batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> TargetOutput:
        output = super().forward(batch, on_layer_kv=on_layer_kv)
        self._journal.append("forward ended")
        return output


class Prefill(PrefillHalf):
    """A prefill engine whose copies run as early as possible, if possible while the forward runs."""

    def __init__(self, sound: TargetModel, *, early_sending: bool, has_head: bool, chunk_tokens: int) -> None:
        self.journal: list[str] = []
        self.target = WatchedTarget(sound, self.journal)
        self.device = ScriptedDevice(on_host_call=self.run_copies)
        model = TagTarget(self.journal) if has_head else self.target
        super().__init__(
            model,
            self.device,
            draft=TagHead() if has_head else None,
            chunk_tokens=chunk_tokens,
            max_batch_tokens=max(chunk_tokens, 2 * CHUNK_TOKENS),
            max_segment_bytes=model.layer_group.layer_token_bytes * CHUNK_TOKENS,
            early_sending=early_sending,
        )

    def run(self, prompts: Sequence[tuple[int, ...]] = PROMPTS) -> None:
        self.open("call", prompts)
        for _ in range(100):
            if self.ended_calls and self.is_empty:
                return
            self.step(*self._sent())
            for stream in self.device.ready_streams():
                if stream.is_ready:
                    stream.run_next()
        raise AssertionError(f"not over: {self.engine.load()}")

    def run_copies(self, device: ScriptedDevice) -> None:
        sending = device.stream("sending")
        while sending.is_ready:
            sending.run_next()
            self.journal.append("layers left")

    def _sent(self) -> list[BytesSent]:
        unsent_bytes = self.engine.load().unsent_bytes
        is_copying = self.device.stream("sending").pending()
        return [BytesSent("call", unsent_bytes)] if unsent_bytes and not is_copying else []


MakePrefill = Callable[..., Prefill]


@pytest.fixture
def make_prefill(tiny_target: Callable[[str], TargetModel]) -> Iterator[MakePrefill]:
    made: list[Prefill] = []

    def make(*, early_sending: bool = True, has_head: bool = False, chunk_tokens: int = CHUNK_TOKENS) -> Prefill:
        made.append(
            Prefill(tiny_target("llama"), early_sending=early_sending, has_head=has_head, chunk_tokens=chunk_tokens)
        )
        return made[-1]

    yield make
    for prefill in made:
        prefill.close()


@pytest.mark.parametrize("has_head", [False, True])
def test_the_first_layers_leave_before_their_forward_has_ended(make_prefill: MakePrefill, has_head: bool) -> None:
    """They do so of every prompt, although a head's KV comes last."""
    prefill = make_prefill(has_head=has_head)
    prefill.run()
    one_forward = ["layers left"] * (2 * NUM_LAYERS) + ["forward ended"]  # each layer of one chunk, of either prompt
    assert prefill.journal[: len(one_forward)] == one_forward


def test_what_is_written_waits_for_no_later_forward_of_another_call(make_prefill: MakePrefill) -> None:
    """Two forwards, of different calls, are launched. The first has ended and the second has not begun."""
    prefill = make_prefill(chunk_tokens=16)
    prefill.device.on_host_call = lambda device: None
    forward, sending = (prefill.device.stream(name) for name in ("forward", "sending"))
    prefill.step(*(OpenCall(call, handoff_rows([range(16)])) for call in "xy"))
    assert forward.pending().count("forward") == 2
    while prefill.target.num_forwards == 0:
        forward.run_next()
    for _ in range(4):
        while sending.is_ready:
            sending.run_next()
        prefill.step()
    assert prefill.target.num_forwards == 1
    sent = [ready.call_id for ready in prefill.frames if isinstance(ready.frame, KvSegment)]
    assert sent == ["x"] * (NUM_LAYERS * 16 // CHUNK_TOKENS)
    prefill.device.on_host_call = prefill.run_copies


def test_one_setting_sends_all_layers_behind_their_forward(make_prefill: MakePrefill) -> None:
    prefill = make_prefill(early_sending=False)
    prefill.run()
    assert prefill.journal[0] == "forward ended"


def test_a_row_whose_kv_cannot_be_copied_fails_at_once_although_its_first_token_has_left(
    make_prefill: MakePrefill,
) -> None:
    prefill = make_prefill(early_sending=False, chunk_tokens=16)
    host_buffer = prefill.device.host_buffer

    def failing_once(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        prefill.device.host_buffer = host_buffer  # type: ignore[method-assign]
        raise MemoryError("planted")

    prefill.device.host_buffer = failing_once  # type: ignore[method-assign]
    prefill.run()
    (failed,) = prefill.failures
    assert (failed.row, failed.reason, failed.retryable) == (0, RowFailure.COMPUTE, True)
    frames = [ready.frame for ready in prefill.frames]
    tokens_left = [i for i, frame in enumerate(frames) if isinstance(frame, PrebuiltBatch) and 0 in frame.rows]
    assert tokens_left and tokens_left[0] < frames.index(failed)
    later = [frame.row for frame in frames[frames.index(failed) :] if isinstance(frame, KvSegment)]
    assert later and 0 not in later, "the call goes on with its other row"


@pytest.mark.parametrize("forward", [0, 1])
def test_a_forward_that_fails_midway_fails_its_rows_although_layers_have_left(
    make_prefill: MakePrefill, forward: int
) -> None:
    prefill = make_prefill()
    prefill.target.fails_behind = (forward, 0)
    prefill.run(PROMPTS[:1])
    assert prefill.journal.count("layers left") > forward * NUM_LAYERS, "the first layers did leave"
    (failed,) = prefill.failures
    assert (failed.row, failed.reason, failed.retryable) == (0, RowFailure.COMPUTE, True)
    assert "planted" in failed.message
    assert prefill.frames[-1].frame is failed, "nothing follows a row's failure"
    assert not prefill.first_tokens
    written = {(s.layer_start, s.token_start) for s in prefill.segments}
    whole = {(layer, chunk * CHUNK_TOKENS) for chunk in range(forward) for layer in range(NUM_LAYERS)}
    assert written - whole <= {(0, forward * CHUNK_TOKENS)}, "what was never written was sent"
