"""Tests that requests with one seed and different `choice_index` draw different tokens, and the same ones every
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from common.draft.head import DraftHead
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from tests.support.drafted import SHAPES, Counts, Drafted
from tests.support.pair import InProcessPair, MakePair, PairOptions

PROMPT = (9, 33, 17, 60, 21, 42)
NUM_CHOICES = 6
NEW_TOKENS = 24
SAMPLED = ResolvedSampling(seed=1 << 63 | 5, max_tokens=NEW_TOKENS, temperature=1.2, top_p=0.97)
GREEDY = ResolvedSampling(seed=5, max_tokens=NEW_TOKENS, temperature=0.0)
LAST_CHOICE = 127

Tiny = Callable[[str], TargetModel]


def choices(
    pair: InProcessPair, indices: Sequence[int], *, sampling: ResolvedSampling = SAMPLED, at_once: bool = True
) -> list[list[int]]:
    """Returns the tokens of each choice. The choices run all in one batch, or one after the other."""
    outcomes = []
    for number, index in enumerate(indices):
        outcomes.append(pair.submit(f"{number} {len(pair.outcomes)}", PROMPT, sampling, choice_index=index))
        if not at_once:
            pair.run()
    pair.finish_prefill()
    pair.run()
    assert all(outcome.finished is not None for outcome in outcomes)
    return [outcome.token_ids for outcome in outcomes]


@pytest.fixture
def pair(make_pair: MakePair, tiny_target: Tiny) -> InProcessPair:
    return make_pair(tiny_target("llama"))


def test_each_choice_has_its_own_tokens_the_same_alone_in_a_batch_and_again(pair: InProcessPair) -> None:
    indices = (*range(NUM_CHOICES), LAST_CHOICE)
    batch = choices(pair, indices)
    assert len({tuple(tokens) for tokens in batch}) == len(indices)
    assert len({tokens[0] for tokens in batch}) > 1, "the first token is prefill's"
    assert len({tokens[-1] for tokens in batch}) > 1
    assert choices(pair, indices) == batch
    assert choices(pair, indices, at_once=False) == batch


def test_without_an_index_it_is_the_first_choice(pair: InProcessPair) -> None:
    plain = pair.submit("plain", PROMPT, SAMPLED)
    pair.run()
    assert choices(pair, [0]) == [plain.token_ids]


def test_a_greedy_output_is_the_same_for_each(pair: InProcessPair) -> None:
    first, *others = choices(pair, range(NUM_CHOICES), sampling=GREEDY)
    assert all(tokens == first for tokens in others)


def test_a_resumed_request_goes_on_with_its_own_choice(pair: InProcessPair) -> None:
    (whole,) = choices(pair, [3])
    for num_delivered in (1, NEW_TOKENS // 2):
        brought = [*PROMPT, *whole[:num_delivered]]
        rest = pair.submit(f"from {num_delivered}", brought, SAMPLED, prompt_len=len(PROMPT), choice_index=3)
        pair.run()
        assert rest.token_ids == whole[num_delivered:]


def test_a_retracted_request_comes_back_with_its_own_choice(make_pair: MakePair, tiny_target: Tiny) -> None:
    undisturbed = choices(make_pair(tiny_target("llama")), range(NUM_CHOICES))
    short = make_pair(tiny_target("llama"), PairOptions(decode_tokens=128))
    assert choices(short, range(NUM_CHOICES)) == undisturbed
    assert short.decode.load().num_retractions > 0


@pytest.mark.parametrize("shape", ["chain-4", "tree-4x3-15"])
def test_drafts_change_no_choice(shape: str, leaning: Drafted, make_pair: MakePair) -> None:
    def run(draft: DraftHead | None) -> tuple[list[list[int]], InProcessPair]:
        pair = make_pair(leaning.target, PairOptions(context_tokens=128, **SHAPES[shape]), draft=draft)
        return choices(pair, range(NUM_CHOICES)), pair

    expected, _ = run(None)
    found, drafted = run(leaning.head)
    assert found == expected
    assert len({tuple(tokens) for tokens in found}) == NUM_CHOICES
    counts = Counts.of(drafted.outcomes.values())
    assert counts.tokens_per_step > 1.5, "drafts are drawn with the noise of another choice"
