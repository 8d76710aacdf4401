"""Tests frames that no correct replica sends. They fail the row they name, the call's other rows are retried, and
nothing leaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from common.errors import EngineFault
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from common.wire.handoff import Frame, KvSegment, PrebuiltBatch
from tests.support.pair import InProcessPair, MakePair, PairOptions

Tiny = Callable[[str], TargetModel]
Corrupt = Callable[[KvSegment], Sequence[KvSegment]]
CorruptColumns = Callable[[PrebuiltBatch, int], Sequence[PrebuiltBatch]]
VICTIM = 1
NUM_ROWS = 4
NEW_TOKENS = 8
OPTIONS = PairOptions(chunk_tokens=16, max_batch_tokens=64, max_segment_bytes=4096)

SEGMENTS: dict[str, Corrupt] = {
    "comes twice": lambda segment: [segment, segment],
    "overlaps the one before": lambda segment: [segment, replace(segment, token_start=segment.token_start + 1)],
    "begins after the row": lambda segment: [replace(segment, token_start=1000)],
    "ends after the row": lambda segment: [replace(segment, token_start=40 - segment.num_tokens + 1)],
    "has layers past the last": lambda segment: [replace(segment, layer_start=1)],
    "has no such layer group": lambda segment: [replace(segment, layer_group="draft")],
    "has no tokens": lambda segment: [replace(segment, num_tokens=0, payload=b"")],
    "has too few bytes": lambda segment: [replace(segment, payload=segment.payload[:-4])],
    "has too many bytes": lambda segment: [replace(segment, payload=bytes(segment.payload) + bytes(4))],
}


def with_column(columns: PrebuiltBatch, name: str, entry: int, value: int) -> PrebuiltBatch:
    changed = getattr(columns, name).copy()
    changed[entry] = value
    return replace(columns, **{name: changed})


def with_bytes_sent(columns: PrebuiltBatch, entry: int, change: int) -> PrebuiltBatch:
    sent = {name: sizes + change * (np.arange(len(sizes)) == entry) for name, sizes in columns.bytes_sent.items()}
    return replace(columns, bytes_sent=sent)


PREBUILT: dict[str, CorruptColumns] = {
    "comes twice": lambda columns, entry: [columns, columns],
    "has a longer seq_len": lambda columns, entry: [with_column(columns, "seq_lens", entry, 41)],
    "has seq_len 0": lambda columns, entry: [with_column(columns, "seq_lens", entry, 0)],
    "has a token past the vocabulary": lambda columns, entry: [with_column(columns, "first_token_ids", entry, 1 << 20)],
    "has a negative token": lambda columns, entry: [with_column(columns, "first_token_ids", entry, -1)],
    "names no layer group": lambda columns, entry: [replace(columns, bytes_sent={})],
}


def submit_all(pair: InProcessPair) -> None:
    """Submits all requests in one step, so that they share a call. Row i of the call is request i."""
    for number in range(NUM_ROWS):
        sampling = ResolvedSampling(seed=number, max_tokens=NEW_TOKENS)
        pair.submit(str(number), [30 + number + place for place in range(40)], sampling)


@pytest.fixture
def undisturbed(make_pair: MakePair, tiny_target: Tiny) -> dict[str, list[int]]:
    pair = make_pair(tiny_target("llama"), OPTIONS)
    submit_all(pair)
    pair.run()
    return {name: outcome.token_ids for name, outcome in pair.outcomes.items()}


def assert_only_the_victim_failed(pair: InProcessPair, undisturbed: dict[str, list[int]]) -> None:
    for name, outcome in pair.outcomes.items():
        if name == str(VICTIM):
            assert isinstance(outcome.error, EngineFault), outcome
        else:
            assert outcome.token_ids == undisturbed[name], name
    pair.tamper = None
    pair.settle()
    after = pair.submit("after", [30 + place for place in range(40)], ResolvedSampling(seed=0, max_tokens=NEW_TOKENS))
    pair.run()
    assert after.token_ids == undisturbed["0"], "the engines serve on"


@pytest.mark.parametrize("name", SEGMENTS)
def test_a_broken_segment(name: str, make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]]) -> None:
    pair = make_pair(tiny_target("llama"), OPTIONS)
    broken: list[Frame] = []

    def tamper(frame: Frame) -> Sequence[Frame]:
        if not broken and isinstance(frame, KvSegment) and frame.row == VICTIM:
            broken.append(frame)
            return SEGMENTS[name](frame)
        return [frame]

    pair.tamper = tamper
    submit_all(pair)
    pair.run()
    assert pair.decode.load().num_row_retries > 0, "the other rows of the call were retried"
    assert pair.outcomes[str(VICTIM)].token_ids == []
    assert_only_the_victim_failed(pair, undisturbed)


@pytest.mark.parametrize("name", PREBUILT)
def test_a_broken_prebuilt_batch(
    name: str, make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]]
) -> None:
    pair = make_pair(tiny_target("llama"), OPTIONS)
    broken: list[Frame] = []

    def tamper(frame: Frame) -> Sequence[Frame]:
        if not broken and isinstance(frame, PrebuiltBatch) and VICTIM in frame.rows:
            broken.append(frame)
            parts = one_by_one(frame)
            entry = frame.rows.tolist().index(VICTIM)
            return [*PREBUILT[name](parts.pop(entry), 0), *parts]
        return [frame]

    pair.tamper = tamper
    submit_all(pair)
    pair.run()
    assert pair.outcomes[str(VICTIM)].token_ids == []
    assert_only_the_victim_failed(pair, undisturbed)


def one_by_one(columns: PrebuiltBatch) -> list[PrebuiltBatch]:
    """Returns the rows of a PrebuiltBatch as one frame each."""
    return [
        PrebuiltBatch(
            rows=columns.rows[[entry]],
            seq_lens=columns.seq_lens[[entry]],
            first_token_ids=columns.first_token_ids[[entry]],
            bytes_sent={name: sizes[[entry]] for name, sizes in columns.bytes_sent.items()},
            queue_s=columns.queue_s[[entry]],
            compute_s=columns.compute_s[[entry]],
            num_cached_tokens=columns.num_cached_tokens[[entry]],
            first_token_logprobs=(columns.first_token_logprobs[entry],),
        )
        for entry in range(len(columns.rows))
    ]


def test_a_count_of_bytes_that_disagrees_with_what_came(
    make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]]
) -> None:
    pair = make_pair(tiny_target("llama"), OPTIONS)

    def tamper(frame: Frame) -> Sequence[Frame]:
        if isinstance(frame, PrebuiltBatch) and VICTIM in frame.rows:
            return [with_bytes_sent(frame, frame.rows.tolist().index(VICTIM), 4)]
        return [frame]

    pair.tamper = tamper
    submit_all(pair)
    pair.run()
    error = pair.outcomes[str(VICTIM)].error
    assert isinstance(error, EngineFault) and "bytes were sent" in str(error)
    assert_only_the_victim_failed(pair, undisturbed)


def test_a_call_that_ends_without_a_row_has_lost_it(
    make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]]
) -> None:
    pair = make_pair(tiny_target("llama"), OPTIONS)
    dropped: list[Frame] = []

    def tamper(frame: Frame) -> Sequence[Frame]:
        if not dropped and isinstance(frame, PrebuiltBatch) and VICTIM in frame.rows:
            dropped.append(frame)
            entry = frame.rows.tolist().index(VICTIM)
            return [part for i, part in enumerate(one_by_one(frame)) if i != entry]
        return [frame]

    pair.tamper = tamper
    submit_all(pair)
    pair.run()
    assert pair.decode.load().num_row_retries == 1
    assert {name: outcome.token_ids for name, outcome in pair.outcomes.items()} == undisturbed


def test_frames_may_come_in_any_order_within_a_row(
    make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]]
) -> None:
    """An unusual but correct order fails nothing: here the last frames come first, and PrebuiltBatch before the
    segments.
    """
    pair = make_pair(tiny_target("llama"), replace(OPTIONS, chunk_tokens=40, max_batch_tokens=160))
    held: list[Frame] = []

    def tamper(frame: Frame) -> Sequence[Frame]:
        held.append(frame)
        num_bytes = sum(segment.num_bytes for segment in held if isinstance(segment, KvSegment))
        num_rows = sum(len(columns.rows) for columns in held if isinstance(columns, PrebuiltBatch))
        if num_rows < NUM_ROWS or num_bytes < NUM_ROWS * 40 * pair.decode.pool.groups["target"].token_bytes:
            return []
        return list(reversed(held))

    pair.tamper = tamper
    submit_all(pair)
    pair.run()
    assert {name: outcome.token_ids for name, outcome in pair.outcomes.items()} == undisturbed
