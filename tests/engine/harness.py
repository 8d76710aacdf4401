"""The decode engine on a scripted device, with a model and a prefill made of tags.

A token's KV is a tag of the token and its position. The model writes its input's tag and chooses the next token by a
hash of every tag it reads through the row's table and of its input, so that any stale, foreign or missing read shows as
a wrong token against `oracle`, which is sequential and knows no slots, rows, batches or streams.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.device.scripted import ScriptedDevice, ScriptedEvent, ScriptedStream
from common.device.stream import Scope, Stream
from common.errors import BatonError
from common.kv.layer_group import LayerGroupSpec
from common.model.attention import ForwardInput
from common.model.sampling import sample
from common.model.sampling_params import ResolvedSampling
from common.model.sampling_state import RowSeed, SamplingBatch, SamplingState
from common.model.target import TargetModel, TargetOutput
from common.wire.handoff import Frame, KvSegment, PrebuiltBatch
from decode_service.messages import (
    Abort,
    CallEnded,
    Command,
    Event,
    Failed,
    Finished,
    FrameArrived,
    Replica,
    ReplicasChanged,
    StartHandoff,
    Submit,
    Tokens,
)
from decode_service.scheduler import DecodeEngine

VOCAB_SIZE = 1021
CONTEXT_TOKENS = 64
REPLICA = "replica"
GROUP = LayerGroupSpec(name="target", num_layers=2, num_planes=2, num_heads=1, head_dim=2, dtype="float32")

_VALUES_PER_TOKEN = GROUP.num_layers * GROUP.num_planes * GROUP.head_dim
_WEIGHTS = np.random.default_rng(7).integers(1, 1 << 62, size=(CONTEXT_TOKENS, _VALUES_PER_TOKEN))
_HIGH_BITS = 20


def kv_of(token_ids: Sequence[int]) -> NDArray[np.float32]:
    """The KV of tokens 0, 1, ... of a sequence: [layers, planes, tokens, heads, head_dim]."""
    tags = np.asarray(token_ids) * 512 + np.arange(len(token_ids)) + 1
    values = tags[None, :] + np.arange(_VALUES_PER_TOKEN)[:, None]
    per_layer = values.reshape(GROUP.num_layers, GROUP.num_planes, GROUP.head_dim, len(tags))
    return per_layer.transpose(0, 1, 3, 2)[:, :, :, None, :].astype(np.float32)


def _choose(kv: NDArray[np.float32], input_token: int) -> int:
    """The token that follows KV [layers, planes, tokens, heads, head_dim] when the last input was `input_token`."""
    num_tokens = kv.shape[2]
    values = kv[:, :, :, 0, :].transpose(2, 0, 1, 3).reshape(num_tokens, -1).astype(np.int64)
    mixed = int(((values + 1) * _WEIGHTS[:num_tokens]).sum()) + num_tokens * 7919 + input_token * 104729
    return int((mixed >> _HIGH_BITS) % VOCAB_SIZE)


def _logits(kv: NDArray[np.float32], input_token: int) -> Tensor:
    """[vocab]: 4 for the chosen token, between -3 and 3 for the others."""
    chosen = _choose(kv, input_token)
    logits = 3 * torch.cos(torch.arange(VOCAB_SIZE) * float(chosen + 1))
    logits[chosen] = 4.0
    return logits


def oracle(token_ids: Sequence[int], num_tokens: int, sampling: ResolvedSampling) -> list[int]:
    """The `num_tokens` tokens that follow `token_ids`, one after the other, each drawn alone."""
    state = SamplingState(max_rows=1, vocab_size=VOCAB_SIZE, torch_device=torch.device("cpu"))
    state.reset([RowSeed(1, sampling, 0, tuple(token_ids), len(token_ids))])
    batch = SamplingBatch.of([sampling])
    sequence = list(token_ids)
    for _ in range(num_tokens):
        logits = _logits(kv_of(sequence), sequence[-1]).unsqueeze(0)
        drawn = sample(logits, torch.tensor([1]), torch.tensor([len(sequence)]), state, batch)
        sequence.append(int(drawn.token_ids[0]))
    return sequence[len(token_ids) :]


@dataclass(frozen=True, slots=True)
class SeenForward:
    """What one forward read, as values, and weak references to the tensors that its step handed to the stream."""

    input_ids: list[int]
    rows: list[int]
    seq_lens: list[int]
    handed: list[weakref.ref[Tensor]]


class TagModel:
    """Has the attributes of TargetModel."""

    layer_group = GROUP
    vocab_size = VOCAB_SIZE
    max_context_tokens = CONTEXT_TOKENS
    eos_token_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.forwards: list[SeenForward] = []
        self.fails_next = False

    def forward(self, batch: ForwardInput) -> TargetOutput:
        if self.fails_next:
            self.fails_next = False
            raise ValueError("no kernel")
        tokens, positions = batch.input_ids.tolist(), batch.positions.tolist()
        rows, seq_lens = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        handed = (batch.req_pool_indices, batch.seq_lens, batch.positions, batch.out_cache_loc)
        self.forwards.append(SeenForward(tokens, rows, seq_lens, [weakref.ref(tensor) for tensor in handed]))
        for token, position, slot in zip(tokens, positions, batch.out_cache_loc.tolist(), strict=True):
            own = kv_of([0] * position + [token])[:, :, position]
            batch.kv[:, :, slot] = torch.from_numpy(own)
        logits = []
        for token, row, seq_len in zip(tokens, rows, seq_lens, strict=True):
            logits.append(_logits(batch.kv[:, :, batch.req_to_token[row, :seq_len]].numpy(), token))
        return TargetOutput(torch.stack(logits), None)


class _LaggingSchedule(ScriptedStream):
    """The schedule side of a GPU: what the engine's thread asked of the device happens after the call returned."""

    def record(self, scope: Scope | None = None) -> ScriptedEvent:
        def schedule_side_writes() -> None:
            pass

        self.enqueue(schedule_side_writes, scope)
        return cast(ScriptedEvent, super().record(scope))


class LaggingScheduleDevice(ScriptedDevice):
    """A scripted device whose schedule stream, named "schedule", is scripted too."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = _LaggingSchedule(self, "schedule")
        self.streams.append(self.schedule)

    @property
    def schedule_stream(self) -> Stream:
        return self.schedule


@dataclass
class Outcome:
    prompt: tuple[int, ...]
    sampling: ResolvedSampling
    token_ids: list[int] = field(default_factory=list)
    finished: Finished | None = None
    error: BatonError | None = None
    is_abandoned: bool = False

    @property
    def has_ended(self) -> bool:
        return self.finished is not None or self.error is not None or self.is_abandoned

    @property
    def expected(self) -> list[int]:
        return oracle(self.prompt, self.sampling.max_tokens, self.sampling)


@dataclass(frozen=True, slots=True)
class Handoff:
    """A row that the engine asked for and that the test has not delivered yet."""

    call_id: str
    row: int
    token_ids: tuple[int, ...]
    sampling: ResolvedSampling


def _land(device: ScriptedDevice) -> None:
    device.stream("landing").run_all()


class ScriptedEngine:
    """Stepped by the test; nothing on a stream runs but what the test or the device's policy runs.

    Every `step` checks that rows and slots add up.
    """

    def __init__(
        self,
        *,
        device: ScriptedDevice | None = None,
        max_rows: int = 4,
        max_kv_tokens: int = 256,
        overlap: bool = True,
        debug_checks: bool = True,
    ) -> None:
        self.device = device or ScriptedDevice()
        self.model = TagModel()
        ticks = itertools.count()
        self.engine = DecodeEngine(
            model=cast(TargetModel, self.model),
            device=self.device,
            max_rows=max_rows,
            max_kv_tokens=max_kv_tokens,
            max_context_tokens=CONTEXT_TOKENS,
            overlap=overlap,
            clock=lambda: float(next(ticks)),
            debug_checks=debug_checks,
        )
        self.outcomes: dict[str, Outcome] = {}
        self.handoffs: dict[str, Handoff] = {}
        self._open_rows: dict[str, int] = {}
        self._posted: list[Command] = [ReplicasChanged((Replica(REPLICA, True),))]

    @property
    def forward(self) -> ScriptedStream:
        return self.device.stream("forward")

    @property
    def landing(self) -> ScriptedStream:
        return self.device.stream("landing")

    def submit(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, *, temperature: float = 0.0, seed: int = 0
    ) -> Outcome:
        sampling = ResolvedSampling(seed=seed, max_tokens=max_tokens, temperature=temperature)
        self._posted.append(Submit(request_id, tuple(prompt), len(prompt), sampling))
        self.outcomes[request_id] = Outcome(tuple(prompt), sampling)
        return self.outcomes[request_id]

    def post(self, command: Command) -> None:
        self._posted.append(command)

    def abort(self, request_id: str) -> None:
        """The client leaves; nothing more is expected of this request."""
        self.outcomes[request_id].is_abandoned = True
        self.handoffs.pop(request_id, None)
        self._posted.append(Abort(request_id))

    def hand_over(self, request_id: str) -> None:
        """Answer the request's handoff: its KV in two segments, its PrebuiltBatch entry between them."""
        handoff = self.handoffs.pop(request_id)
        kv = kv_of(handoff.token_ids)
        middle = len(handoff.token_ids) // 2
        halves = [
            KvSegment(handoff.row, GROUP.name, 0, GROUP.num_layers, start, stop - start, kv[:, :, start:stop].tobytes())
            for start, stop in ((middle, len(handoff.token_ids)), (0, middle))
            if stop > start
        ]
        prebuilt = PrebuiltBatch(
            rows=np.array([handoff.row]),
            seq_lens=np.array([len(handoff.token_ids)]),
            first_token_ids=np.array(oracle(handoff.token_ids, 1, handoff.sampling)),
            bytes_sent={GROUP.name: np.array([kv.nbytes])},
            queue_s=np.zeros(1),
            compute_s=np.zeros(1),
            first_token_logprobs=(None,),
        )
        frames: list[Frame] = [halves[0], prebuilt, *halves[1:]]
        for frame in frames:
            self._posted.append(FrameArrived(handoff.call_id, frame))
        self._open_rows[handoff.call_id] -= 1
        if self._open_rows[handoff.call_id] == 0:
            self._posted.append(CallEnded(handoff.call_id, None))

    def step(self) -> list[Event]:
        commands, self._posted = self._posted, []
        events = list(self.engine.step(commands))
        for event in events:
            self._note(event)
        load = self.engine.load()
        for counts in (load.rows, load.slots):
            parts = (counts.free, counts.reserved, counts.transferring, counts.running, counts.quarantined)
            assert sum(parts) == counts.total, f"not conserved: {counts}"
        return events

    def start(self, *request_ids: str) -> None:
        """Step until these requests run and a forward of theirs is in flight, not begun."""
        self.step()
        for request_id in request_ids:
            self.hand_over(request_id)
        self.step()
        self.landing.run_all()
        self.step()
        assert self.forward.pending(), "nothing was launched"

    def run(self, *, advance: Callable[[ScriptedDevice], None] = _land, max_steps: int = 400) -> None:
        """Step, and hand over whatever the engine asks for, until every request has ended and all is free again."""
        for _ in range(max_steps):
            if self._is_over():
                self.engine.pool.check_conservation()
                return
            self.step()
            for request_id in list(self.handoffs):
                self.hand_over(request_id)
            advance(self.device)
        raise AssertionError(f"not over after {max_steps} steps: {self.engine.load()}")

    def _is_over(self) -> bool:
        load = self.engine.load()
        all_free = load.rows.free == load.rows.total and load.slots.free == load.slots.total
        return all_free and all(outcome.has_ended for outcome in self.outcomes.values()) and not self._posted

    def _note(self, event: Event) -> None:
        match event:
            case StartHandoff(call_id, _, rows):
                self._open_rows[call_id] = len(rows)
                for index, row in enumerate(rows):
                    self.handoffs[row.request_id] = Handoff(call_id, index, row.token_ids, row.sampling)
            case Tokens(request_id, token_ids):
                self.outcomes[request_id].token_ids.extend(token_ids)
            case Finished():
                self.outcomes[event.request_id].finished = event
            case Failed(request_id, error):
                self.outcomes[request_id].error = error
            case _:
                pass


def refuses(action: Callable[[], object]) -> bool:
    """Whether `action` fails an assertion."""
    try:
        action()
    except AssertionError:
        return True
    return False
