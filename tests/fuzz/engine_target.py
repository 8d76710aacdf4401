"""The fuzz target for a replica's frames as the decode engine takes them: the codec, the landing zone and the real
engine on a tiny model.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st

from baton.v1 import prefill_pb2
from common.draft.head import DraftHead
from common.draft.seed import seed_columns
from common.errors import BatonError, EngineFault, FingerprintMismatch, PrefillUnavailable
from common.model.target import TargetModel
from common.rpc.messages import ProtocolError
from common.sampling.params import ResolvedSampling
from common.wire.codec_fingerprint import PROTOCOL_VERSION
from common.wire.codec_frames import FrameCodec
from common.wire.fingerprint import NO_SPECULATION, Fingerprint
from common.wire.handoff import HandoffRow
from decode_service import messages as decode
from decode_service.schedule.scheduler import DecodeEngine
from decode_service.speculate.spec_info import NO_DRAFTS, SpecInfo
from tests.fuzz.pure_targets import checksummed
from tests.fuzz.target import Run, Target, join, split
from tests.fuzz.wire_strategies import hostile_messages
from tests.support.draft_heads import save_eagle3_head
from tests.support.drafted import load_drafted
from tests.support.engines import Received, new_decode_engine
from tests.support.loading import load_target
from tests.support.models import save_tiny_model

REPLICA = "replica"
BOUND_S = 20.0
_TICK_S = 0.05
PROMPTS = ((5, 6, 7), (8, 9))
TREE = SpecInfo(2, 4, topk=2)


@dataclass
class _Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class EngineUnderFire:
    """A decode engine whose prefill replica is played by the target. `attack` answers every call that the engine opens
    with the same frames.
    """

    engine: DecodeEngine
    received: Received[decode.Event]
    codec: FrameCodec
    clock: _Clock
    number: int = 0
    endings: dict[str, int] = field(default_factory=dict)

    def attack(self, frames: Sequence[bytes], *, ends_well: bool) -> None:
        """Submits two requests and answers them with these frames. Each request must end exactly once, and afterwards
        nothing may be held.
        """
        self.number += 1
        self.endings = {f"{self.number}/{index}": 0 for index in range(len(PROMPTS))}
        commands: list[decode.Command] = [decode.ReplicasChanged((decode.Replica(REPLICA, is_ready=True),))]
        for index, (request_id, token_ids) in enumerate(zip(self.endings, PROMPTS, strict=True)):
            sampling = ResolvedSampling(seed=7, max_tokens=4, temperature=0.0, num_logprobs=2 if index else None)
            commands.append(decode.Submit(request_id, token_ids, len(token_ids), sampling))
        give_up_s = time.monotonic() + BOUND_S
        while not self._is_over():
            assert time.monotonic() < give_up_s, f"no end: {self.endings}, {self.engine.load()}"
            events, commands = self._step(commands), []
            for event in events:
                commands.extend(self._answer(event, frames, ends_well=ends_well))
        assert set(self.endings.values()) == {1}, self.endings
        self.engine.pool.check_conservation()

    def _step(self, commands: Sequence[decode.Command]) -> Sequence[decode.Event]:
        if not commands:
            time.sleep(min(0.0005, self.engine.idle_timeout_s()))
        self.clock.now_s += _TICK_S
        self.engine.step(commands)
        return self.received.take()

    def _answer(self, event: decode.Event, frames: Sequence[bytes], *, ends_well: bool) -> list[decode.Command]:
        match event:
            case decode.StartHandoff():
                return self._play(event.call_id, event.rows, frames, ends_well=ends_well)
            case decode.Finished() | decode.Failed():
                self.endings[event.request_id] += 1
        return []

    def _play(
        self, call_id: str, rows: Sequence[HandoffRow], frames: Sequence[bytes], *, ends_well: bool
    ) -> list[decode.Command]:
        """Returns the commands that a transport would post for these frames. The first frame that breaks the protocol
        ends the call.
        """
        reports: list[decode.Command] = []
        end: BatonError | None = None if ends_well else PrefillUnavailable("the replica was lost")
        try:
            for frame in frames:
                reports.append(decode.FrameArrived(call_id, self.codec.decode(frame, rows)))
        except ProtocolError as error:
            end = EngineFault(f"{REPLICA} broke the protocol: {error}")
        except FingerprintMismatch as error:
            end = error
        return [*reports, decode.CallEnded(call_id, end)]

    def _is_over(self) -> bool:
        load = self.engine.load()
        is_empty = load.rows.free == load.rows.total and not load.slots.held
        return is_empty and all(self.endings.values())


def fingerprint_of(model: TargetModel, head: DraftHead | None) -> Fingerprint:
    return Fingerprint(
        protocol_version=PROTOCOL_VERSION,
        config_digest="c0ffee",
        target_weights_digest="beef",
        tokenizer_digest="7e57",
        dtype="float32",
        layer_groups=(model.layer_group, *([head.layer_group] if head else [])),
        draft_weights_digest="d4af" if head else "",
        algorithm="eagle" if head else NO_SPECULATION,
        seed_columns=seed_columns(head, topk=TREE.topk) if head else (),
    )


def _under_fire(model: TargetModel, head: DraftHead | None) -> EngineUnderFire:
    clock = _Clock()
    received: Received[decode.Event] = Received()
    engine = new_decode_engine(
        model,
        outbox=received,
        max_kv_tokens=128,
        max_context_tokens=32,
        draft=head,
        spec_info=TREE if head else NO_DRAFTS,
        prefill_timeout_s=1.0,
        clock=clock,
    )
    codec = FrameCodec(fingerprint=fingerprint_of(model, head), vocab_size=model.vocab_size)
    return EngineUnderFire(engine, received, codec, clock)


@contextmanager
def replica_frames() -> Iterator[Run]:
    """Yields the target for a replica's frames. If an input's first byte is odd, the engine speculates; the byte's
    second bit says whether the call ends well, and the rest of the input is the frames.
    """
    with tempfile.TemporaryDirectory() as directory:
        target_dir = save_tiny_model(Path(directory, "target"), "llama")
        head_dir = save_eagle3_head(Path(directory, "head"), target_dir=target_dir)
        plain = load_target(target_dir, device="cpu", dtype="float32")
        drafted = load_drafted(target_dir, head_dir)
    engines = (_under_fire(plain, None), _under_fire(drafted.target, drafted.head))

    def run(data: bytes) -> None:
        control, frames = data[0] if data else 0, split(data[1:])
        engines[control & 1].attack(
            [checksummed(prefill_pb2.HandoffFrame, frame) for frame in frames], ends_well=bool(control & 2)
        )

    try:
        yield run
    finally:
        for each in engines:
            each.engine.close()


def _sequences(seeds: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    """Draws inputs from a seed's frames, some of them replaced, left out, repeated or swapped."""
    frames = tuple({frame: None for seed in seeds for frame in split(seed[1:])})
    one = st.one_of(
        st.sampled_from(frames), st.sampled_from(frames), hostile_messages(prefill_pb2.HandoffFrame.DESCRIPTOR, frames)
    )

    @st.composite
    def sequence(draw: st.DrawFn) -> bytes:
        seed = draw(st.sampled_from(seeds))
        drawn = split(seed[1:])
        for _ in range(draw(st.integers(0, 3))):
            position = draw(st.integers(0, len(drawn)))
            drawn[position : position + draw(st.integers(0, 2))] = draw(st.lists(one, max_size=2))
        return bytes((draw(st.integers(0, 3)) if draw(st.booleans()) else seed[0] if seed else 0,)) + join(drawn)

    return sequence()


REPLICA_FRAMES = Target(name="replica_frames", inputs=_sequences, open=replica_frames, is_pure=True)
