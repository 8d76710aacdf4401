"""Tests of speculation when slots run short, when a head's output overflows, and when a replica hands over invalid
drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from common.attention.backend import ForwardInput
from common.draft.head import DraftOutput, output_of
from common.sampling.params import ResolvedSampling
from common.wire.handoff import Frame, PrebuiltBatch
from tests.support.drafted import SHAPES, Drafted, assert_same
from tests.support.pair import InProcessPair, MakePair, PairOptions

WIDE_TREE: dict[str, int] = {"draft_topk": 8, "num_draft_steps": 8, "num_draft_tokens": 15}


def submit_all(pair: InProcessPair, num_requests: int, *, prompt_tokens: int = 10, new_tokens: int = 40) -> None:
    for number in range(num_requests):
        sampling = ResolvedSampling(seed=number, max_tokens=new_tokens, temperature=(0.0, 1.0)[number % 2])
        pair.submit(str(number), [4 + (5 * number + place) % 50 for place in range(prompt_tokens)], sampling)


@pytest.mark.parametrize("adapts_depth", [True, False], ids=["adaptive", "fixed"])
def test_a_tree_that_needs_many_slots_is_served_from_a_small_pool(
    adapts_depth: bool, leaning: Drafted, make_pair: MakePair
) -> None:
    """A step without free slots for drafts does not draft. If it did, it would take slots from a handoff under way,
    again and again.
    """
    options = PairOptions(decode_tokens=260, adapts_depth=adapts_depth, **WIDE_TREE)
    plain, pair = make_pair(leaning.target, options), make_pair(leaning.target, options, draft=leaning.head)
    for each in (plain, pair):
        submit_all(each, 6, prompt_tokens=60, new_tokens=60)
        each.run(bound_s=60)
    for name, expected in plain.outcomes.items():
        assert_same(pair.outcomes[name], expected)


def test_drafts_are_given_up_before_a_request_is(copying: Drafted, make_pair: MakePair) -> None:
    """Two requests fill the pool together, and near their ends no slot is left for drafts."""
    options = PairOptions(decode_tokens=112, num_draft_tokens=5)
    pair = make_pair(copying.target, options, draft=copying.head)
    submit_all(pair, 2, prompt_tokens=16, new_tokens=40)
    pair.run()
    assert all(outcome.finished is not None for outcome in pair.outcomes.values())
    assert pair.decode.load().num_retractions == 0
    levels = {step.speculation.num_levels for step in pair.decode_steps if step.speculation}
    assert levels == {0, 5}, "slots were never short"


class OverflowingHead:
    """A head that outputs NaN in every third row of a tree's levels."""

    def __init__(self, head: Any) -> None:
        self._head = head

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def forward(self, batch: ForwardInput, hidden: Tensor, *, layer: int = 0) -> Tensor:
        output: Tensor = self._head.forward(batch, hidden, layer=layer)
        if batch.tree_mask is not None:
            output = output.clone()
            output[::3] = float("nan")
        return output

    def step(self, batch: ForwardInput, hidden: Tensor) -> DraftOutput:
        return output_of(self, batch, hidden)


@pytest.mark.parametrize("shape", ["tree-2x4-9", "tree-4x3-15"])
def test_a_head_that_overflows_changes_no_token(shape: str, leaning: Drafted, make_pair: MakePair) -> None:
    options = PairOptions(**SHAPES[shape])
    plain = make_pair(leaning.target, options)
    pair = make_pair(leaning.target, options, draft=OverflowingHead(leaning.head))
    for each in (plain, pair):
        submit_all(each, 8)
        each.run()
    for name, expected in plain.outcomes.items():
        assert_same(pair.outcomes[name], expected)


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
    options = PairOptions(max_handoff_attempts=1, **SHAPES[shape])
    pair = make_pair(leaning.target, options, draft=leaning.head)
    submit_all(pair, 3)
    pair.run(until=lambda: all(len(outcome.token_ids) > 3 for outcome in pair.outcomes.values()))

    def tamper(frame: Frame) -> list[Frame]:
        if not isinstance(frame, PrebuiltBatch):
            return [frame]
        column = np.array(frame.seed_columns["topk_index"])
        change(column)
        return [dataclasses.replace(frame, seed_columns={**frame.seed_columns, "topk_index": column})]

    pair.tamper = tamper
    bad = pair.submit("bad", [8, 9, 10], ResolvedSampling(seed=9, max_tokens=20, temperature=0.0))
    pair.run()
    assert bad.error is not None and said in str(bad.error)
    assert all(outcome.finished is not None for name, outcome in pair.outcomes.items() if name != "bad")
