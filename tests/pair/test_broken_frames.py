"""Tests frames that no correct replica sends. They fail the row they name, the call's other rows are retried, and
nothing leaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from common.errors import EngineFault
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from common.wire.handoff import Frame, KvSegment, PrebuiltBatch
from tests.support.drafted import SHAPES, Drafted
from tests.support.pair import InProcessPair, MakePair, PairOptions

Tiny = Callable[[str], TargetModel]
Corrupt = Callable[[KvSegment], Sequence[KvSegment]]
CorruptColumns = Callable[[PrebuiltBatch], Sequence[PrebuiltBatch]]
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


def with_first(columns: PrebuiltBatch, name: str, value: int) -> Sequence[PrebuiltBatch]:
    changed = getattr(columns, name).copy()
    changed[0] = value
    return [replace(columns, **{name: changed})]


PREBUILT: dict[str, CorruptColumns] = {
    "comes twice": lambda columns: [columns, columns],
    "has a longer seq_len": lambda columns: with_first(columns, "seq_lens", 41),
    "has seq_len 0": lambda columns: with_first(columns, "seq_lens", 0),
    "has a token past the vocabulary": lambda columns: with_first(columns, "first_token_ids", 1 << 20),
    "has a negative token": lambda columns: with_first(columns, "first_token_ids", -1),
    "names no layer group": lambda columns: [replace(columns, bytes_sent={})],
    "counts other bytes than came": lambda columns: [
        replace(columns, bytes_sent={name: sizes + 4 for name, sizes in columns.bytes_sent.items()})
    ],
}
"""What is wrong with a PrebuiltBatch of one row."""


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


def tampered_once(pair: InProcessPair, change: Callable[[Frame], Sequence[Frame] | None]) -> None:
    """Lets `change` replace the first frame for which it returns others, and runs all requests."""
    changed: list[Frame] = []

    def tamper(frame: Frame) -> Sequence[Frame]:
        arriving = None if changed else change(frame)
        if arriving is None:
            return [frame]
        changed.append(frame)
        return arriving

    pair.tamper = tamper
    submit_all(pair)
    pair.run()


@pytest.mark.parametrize("name", SEGMENTS)
def test_a_broken_segment(name: str, make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]]) -> None:
    def change(frame: Frame) -> Sequence[Frame] | None:
        return SEGMENTS[name](frame) if isinstance(frame, KvSegment) and frame.row == VICTIM else None

    pair = make_pair(tiny_target("llama"), OPTIONS)
    tampered_once(pair, change)
    assert pair.decode.load().num_row_retries > 0, "the other rows of the call were retried"
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


def entry_of_the_victim(frame: Frame) -> tuple[PrebuiltBatch, list[PrebuiltBatch]] | None:
    """Returns the victim's entry of a PrebuiltBatch, and the other entries."""
    if not isinstance(frame, PrebuiltBatch) or VICTIM not in frame.rows:
        return None
    entries = one_by_one(frame)
    return entries.pop(frame.rows.tolist().index(VICTIM)), entries


@pytest.mark.parametrize("name", PREBUILT)
def test_a_broken_prebuilt_batch(
    name: str, make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]]
) -> None:
    def change(frame: Frame) -> Sequence[Frame] | None:
        found = entry_of_the_victim(frame)
        return found and [*PREBUILT[name](found[0]), *found[1]]

    pair = make_pair(tiny_target("llama"), OPTIONS)
    tampered_once(pair, change)
    error = pair.outcomes[str(VICTIM)].error
    assert pair.outcomes[str(VICTIM)].token_ids == []
    assert name != "counts other bytes than came" or "bytes were sent" in str(error)
    assert_only_the_victim_failed(pair, undisturbed)


def test_a_call_that_ends_without_a_row_has_lost_it(
    make_pair: MakePair, tiny_target: Tiny, undisturbed: dict[str, list[int]]
) -> None:
    def drop(frame: Frame) -> Sequence[Frame] | None:
        found = entry_of_the_victim(frame)
        return found and found[1]

    pair = make_pair(tiny_target("llama"), OPTIONS)
    tampered_once(pair, drop)
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


# ---- drafts ----------------------------------------------------------------------------------------------------------


def beyond(column: NDArray[Any]) -> None:
    column[:] = 10**6


def negative(column: NDArray[Any]) -> None:
    column[:] = -1


def twice(column: NDArray[Any]) -> None:
    column[:, 1] = column[:, 0]


@pytest.mark.parametrize(
    ("change", "shape", "said"),
    [
        (beyond, "chain-4", "not in the vocabulary"),
        (negative, "chain-4", "not in the vocabulary"),
        (twice, "tree-2x4-9", "names a token twice"),
    ],
    ids=["beyond", "negative", "twice"],
)
def test_drafts_that_are_none_lose_their_row_alone(
    change: Callable[[NDArray[Any]], None], shape: str, said: str, leaning: Drafted, make_pair: MakePair
) -> None:
    def tamper(frame: Frame) -> list[Frame]:
        if not isinstance(frame, PrebuiltBatch):
            return [frame]
        column = np.array(frame.seed_columns["topk_index"])
        change(column)
        return [replace(frame, seed_columns={**frame.seed_columns, "topk_index": column})]

    sampling = ResolvedSampling(seed=9, max_tokens=20, temperature=0.0)
    pair = make_pair(leaning.target, PairOptions(max_handoff_attempts=1, **SHAPES[shape]), draft=leaning.head)
    others = [pair.submit(str(number), [4 + number, 9, 10], sampling) for number in range(3)]
    pair.run(until=lambda: all(len(outcome.token_ids) > 3 for outcome in others))
    pair.tamper = tamper
    bad = pair.submit("bad", [8, 9, 10], sampling)
    pair.run()
    assert bad.error is not None and said in str(bad.error)
    assert all(outcome.finished is not None for outcome in others)
