"""Tests that seeded requests give, token for token, the output of decoding without speculation (invariants I12, I13).

The target depends mostly on its last token, but on all others too. So a head that knows the usual next token is often
right and often wrong, and misplaced KV changes the tokens drawn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from common.draft.head import DraftHead
from common.sampling.params import ResolvedSampling
from tests.pair import speculation_mutants as mutants
from tests.pair.speculation_mutants import Mutant
from tests.support.drafted import SAMPLED, SHAPES, Counts, Drafted, assert_same
from tests.support.models import SMALL_VOCAB_SIZE
from tests.support.pair import Outcome, PairOptions, pairs_that_keep_all

NUM_REQUESTS = 200
NUM_FOR_A_MUTANT = 60
MIXED: tuple[dict[str, Any], ...] = (
    *SAMPLED.values(),
    SAMPLED["top_p"] | SAMPLED["penalties"],
    SAMPLED["min_p"] | SAMPLED["bias"] | SAMPLED["ends"],
    SAMPLED["top_p"] | SAMPLED["penalties"] | SAMPLED["bias"] | SAMPLED["ends"],
)
HEAD_AND_SHAPE = [("leaning", "chain-4"), ("leaning", "tree-4x3-15"), ("leaning_layers", "chain-4")]


@dataclass(frozen=True, slots=True)
class SeededRequest:
    prompt: tuple[int, ...]
    sampling: ResolvedSampling


def seeded_requests(num_requests: int) -> list[SeededRequest]:
    """Returns random requests. Half of them have temperature 0.7 and half 1.0, and each half has every combination of
    options.
    """
    numbers = random.Random(17)
    return [
        SeededRequest(
            tuple(numbers.randrange(4, SMALL_VOCAB_SIZE) for _ in range(numbers.randint(1, 24))),
            ResolvedSampling(
                seed=numbers.getrandbits(64),
                max_tokens=numbers.randint(16, 32),
                temperature=(0.7, 1.0)[number % 2],
                **MIXED[number % len(MIXED)],
            ),
        )
        for number in range(num_requests)
    ]


def run(drafted: Drafted, draft: DraftHead | None, shape: str, requests: Sequence[SeededRequest]) -> list[Outcome]:
    options = PairOptions(
        prefill_rows=32, prefill_tokens=4096, decode_rows=32, decode_tokens=4096, context_tokens=128, **SHAPES[shape]
    )
    with pairs_that_keep_all() as make_pair:
        pair = make_pair(drafted.target, options, draft=draft)
        for number, request in enumerate(requests):
            pair.submit(str(number), request.prompt, request.sampling)
        pair.run()
        return list(pair.outcomes.values())


@pytest.fixture(scope="module")
def without_drafts(leaning: Drafted) -> list[Outcome]:
    return run(leaning, None, "chain-4", seeded_requests(NUM_REQUESTS))


def check_output_is_that_without_drafts(
    drafted: Drafted, shape: str, without_drafts: Sequence[Outcome], num_requests: int
) -> Counts:
    outcomes = run(drafted, drafted.head, shape, seeded_requests(num_requests))
    expected = without_drafts[:num_requests]
    num_other = sum(each.token_ids != wanted.token_ids for each, wanted in zip(outcomes, expected, strict=True))
    assert num_other == 0, f"{num_other} of {num_requests} requests have other tokens than without drafts"
    for each, wanted in zip(outcomes, expected, strict=True):
        assert_same(each, wanted)
    return Counts.of(outcomes)


@pytest.mark.parametrize(("head", "shape"), HEAD_AND_SHAPE)
def test_200_seeded_requests_are_as_without_drafts(
    head: str, shape: str, without_drafts: list[Outcome], request: pytest.FixtureRequest
) -> None:
    drafted: Drafted = request.getfixturevalue(head)
    counts = check_output_is_that_without_drafts(drafted, shape, without_drafts, NUM_REQUESTS)
    print(
        f"{head}, {shape}: {NUM_REQUESTS} requests, {counts.num_steps} steps, {counts.num_accepted} drafts accepted, "
        f"{counts.num_rejected} rejected, {counts.tokens_per_step:.2f} tokens a step"
    )
    assert counts.num_accepted > 2 * NUM_REQUESTS, "too few drafts were accepted to tell anything"
    assert counts.num_rejected > 2 * NUM_REQUESTS, "too few drafts were rejected to tell anything"
    assert len({end for each in without_drafts if each.finished and (end := each.finished.reason)}) == 3


CHAIN, TREE, LAYERS = HEAD_AND_SHAPE


@pytest.mark.parametrize(
    ("mutant", "head_and_shape"),
    [
        (mutants.target_draws_one_position_early, CHAIN),
        (mutants.target_draws_all_tokens_with_one_noise, CHAIN),
        (mutants.penalties_skipped_on_draft_rows, CHAIN),
        (mutants.penalties_skipped_on_draft_rows, TREE),
        (mutants.bias_skipped_on_draft_rows, CHAIN),
        (mutants.min_tokens_skipped_on_draft_rows, CHAIN),
        (mutants.top_p_skipped_on_draft_rows, CHAIN),
        (mutants.ancestors_not_penalised, CHAIN),
        (mutants.ancestors_not_penalised, TREE),
        (mutants.rejected_tokens_counted, CHAIN),
        (mutants.rejected_tokens_counted, TREE),
        (mutants.draft_committed_unverified, CHAIN),
        (mutants.draft_committed_unverified, TREE),
        (mutants.draft_committed_unverified, LAYERS),
        (mutants.token_after_a_refused_draft_committed, CHAIN),
        (mutants.accepted_without_its_parent, TREE),
        (mutants.kv_of_the_path_not_moved, TREE),
        (mutants.verify_mask_is_causal, TREE),
    ],
    ids=lambda value: getattr(value, "__name__", None) or "-".join(value),
)
def test_it_is_seen(
    mutant: Mutant,
    head_and_shape: tuple[str, str],
    without_drafts: list[Outcome],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head, shape = head_and_shape
    drafted: Drafted = request.getfixturevalue(head)
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="other tokens than without drafts") as failure:
        check_output_is_that_without_drafts(drafted, shape, without_drafts, NUM_FOR_A_MUTANT)
    print(f"{mutant.__name__}, {shape}: {str(failure.value).splitlines()[0]}")
