"""Tests that sampled tokens follow the exact distribution (field rule A4, invariant I13).

The target's next token depends on its last token only, so every transition is a draw from a known row of probabilities.
The test computes each row's distribution in float64 from the model's own logits, independently of the code under test.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from tests.pair import speculation_mutants as mutants
from tests.pair.speculation_mutants import Mutant
from tests.support.drafted import SHAPES, Counts, Drafted
from tests.support.goodness_of_fit import chi_square_p_value
from tests.support.models import SMALL_VOCAB_SIZE, next_token_logits
from tests.support.pair import InProcessPair, MakePair, PairOptions, pairs_that_keep_all

pytestmark = pytest.mark.thorough

NUM_REQUESTS = 320
NEW_TOKENS = 40
NUM_FIRST_TOKENS = 1600
NUM_SPECULATING = 160
FIRST_SEED = 1000
FIRST_SOURCES = (7, 19, 33, 52)
SETTINGS = {
    "temperature-0.7": ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, temperature=0.7),
    "temperature-1.0": ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, temperature=1.0),
    "top_p": ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, top_p=0.8),
    "top_k": ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, top_k=12),
    "min_p": ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, min_p=0.1),
}
SPECULATING = (
    ("chain-4", "temperature-1.0"),
    ("chain-4", "top_p"),
    ("tree-4x3-15", "temperature-1.0"),
    ("tree-4x3-15", "min_p"),
)
FALSE_ALARM = 1e-6 / (2 * len(SETTINGS) + len(SPECULATING))
"""The probability with which one test may fail by chance: all of them together may do so once in 10^6 runs. First
tokens and decode tokens are tested with every setting, and decode tokens with drafts for some.
"""

Matrix = NDArray[np.float64]


@pytest.fixture(scope="session")
def logits(last_token_model_dir: Path) -> Matrix:
    return next_token_logits(last_token_model_dir).double().numpy()


def distribution(logits: Matrix, sampling: ResolvedSampling) -> Matrix:
    """Returns the exact distributions [vocab, vocab]: row t applies after token t. Asserts that no top-k or top-p cut
    lies within rounding error.
    """
    scaled = logits / sampling.temperature
    order = np.argsort(-scaled, axis=1, kind="stable")
    ordered = np.take_along_axis(scaled, order, axis=1)
    kept = np.ones_like(ordered, dtype=bool)
    if sampling.top_k:
        assert np.abs(np.diff(ordered[:, sampling.top_k - 1 : sampling.top_k + 1])).min() > 1e-5
        kept[:, sampling.top_k :] = False
    probs = normalised(np.exp(ordered - ordered[:, :1]) * kept)
    mass_before = np.cumsum(probs, axis=1) - probs
    if sampling.top_p < 1:
        assert np.abs(mass_before - sampling.top_p).min() > 1e-6
        kept &= mass_before < sampling.top_p
    if sampling.min_p > 0:
        relative = probs / probs[:, :1]
        assert np.abs(relative - sampling.min_p).min() > 1e-6
        kept &= relative >= sampling.min_p
    exact = np.zeros_like(probs)
    np.put_along_axis(exact, order, normalised(probs * kept), axis=1)
    return exact


def normalised(weights: Matrix) -> Matrix:
    totals: Matrix = weights.sum(axis=1, keepdims=True)
    return weights / totals


def p_value(counts: Matrix, exact: Matrix) -> float:
    """Returns the p-value of one chi-square test over all source tokens (rows). Cells that expect fewer than 5 draws
    are pooled within their row.
    """
    assert counts[exact == 0].sum() == 0, "a token of probability 0 was drawn"
    statistic, degrees = 0.0, 0
    for observed, probs in zip(counts, exact, strict=True):
        expected = probs * observed.sum()
        is_large = expected >= 5
        cells = [*zip(observed[is_large], expected[is_large], strict=True)]
        pooled = expected[~is_large].sum()
        if pooled >= 1:
            cells.append((observed[~is_large].sum(), pooled))
        if len(cells) > 1:
            statistic += sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
            degrees += len(cells) - 1
    assert degrees >= 10, "too few draws to tell anything"
    return chi_square_p_value(statistic, degrees)


def transition_counts(transitions: list[tuple[int, int]]) -> Matrix:
    counts = np.zeros((SMALL_VOCAB_SIZE, SMALL_VOCAB_SIZE))
    for source, token in transitions:
        counts[source, token] += 1
    return counts


def draw(
    pair: InProcessPair, sampling: ResolvedSampling, *, num_requests: int, first_seed: int = FIRST_SEED
) -> tuple[Matrix, Matrix]:
    """Runs the requests. Returns two matrices of counts: of (last prompt token, first token), which prefill draws, and
    of all later pairs of a token and the next one, which decode draws.
    """
    sources = [FIRST_SOURCES[number % len(FIRST_SOURCES)] for number in range(num_requests)]
    outcomes = [
        pair.submit(f"{sampling.max_tokens}-{number}", [5, source], replace(sampling, seed=first_seed + number))
        for number, source in enumerate(sources)
    ]
    pair.run()
    assert all(len(outcome.token_ids) == sampling.max_tokens for outcome in outcomes)
    first = [(source, outcome.token_ids[0]) for source, outcome in zip(sources, outcomes, strict=True)]
    later = [step for outcome in outcomes for step in zip(outcome.token_ids, outcome.token_ids[1:], strict=False)]
    return transition_counts(first), transition_counts(later)


WIDE = PairOptions(
    prefill_rows=80,
    decode_rows=80,
    prefill_tokens=800,
    decode_tokens=80 * 70,
    context_tokens=80,
)


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_follow_the_exact_distribution(
    name: str, make_pair: MakePair, last_token_target: TargetModel, logits: Matrix
) -> None:
    pair = make_pair(last_token_target, WIDE)
    exact = distribution(logits, SETTINGS[name])
    later = draw(pair, SETTINGS[name], num_requests=NUM_REQUESTS)[1]
    first = draw(pair, replace(SETTINGS[name], max_tokens=1), num_requests=NUM_FIRST_TOKENS)[0]
    assert (first.sum(), later.sum()) == (NUM_FIRST_TOKENS, NUM_REQUESTS * (NEW_TOKENS - 1))
    assert p_value(first, exact) > FALSE_ALARM, "first tokens"
    assert p_value(later, exact) > FALSE_ALARM, "decode tokens"


@pytest.mark.parametrize("name", SETTINGS)
def test_the_test_tells_a_setting_from_no_setting(
    name: str, make_pair: MakePair, last_token_target: TargetModel, logits: Matrix
) -> None:
    """Shows that the chi-square test has power: tokens drawn at temperature 0.85 alone fit no setting."""
    exact = distribution(logits, SETTINGS[name])
    sampling = ResolvedSampling(seed=0, max_tokens=24, temperature=0.85)
    counts = draw(make_pair(last_token_target, WIDE), sampling, num_requests=NUM_REQUESTS)[1]
    assert (exact == 0)[counts > 0].any() or p_value(counts, exact) < FALSE_ALARM


# ---- with drafts ----------------------------------------------------------------------------------------------------


def check_tokens_follow_the_exact_distribution_with_drafts(
    erring: Drafted, shape: str, name: str, logits: Matrix
) -> None:
    """The requests have other seeds than in the tests without drafts."""
    with pairs_that_keep_all() as make_pair:
        pair = make_pair(erring.target, replace(WIDE, decode_tokens=80 * 90, **SHAPES[shape]), draft=erring.head)
        counts = draw(pair, SETTINGS[name], num_requests=NUM_SPECULATING, first_seed=FIRST_SEED + NUM_FIRST_TOKENS)[1]
        drafts = Counts.of(pair.outcomes.values())
    assert counts.sum() == NUM_SPECULATING * (NEW_TOKENS - 1)
    p = p_value(counts, distribution(logits, SETTINGS[name]))
    assert drafts.num_accepted > NUM_SPECULATING and drafts.num_rejected > NUM_SPECULATING
    assert p > FALSE_ALARM, "the tokens follow another distribution"


@pytest.mark.parametrize(("shape", "name"), SPECULATING)
def test_tokens_follow_the_exact_distribution_with_drafts(
    shape: str, name: str, erring: Drafted, logits: Matrix
) -> None:
    check_tokens_follow_the_exact_distribution_with_drafts(erring, shape, name, logits)


@pytest.mark.parametrize(
    ("mutant", "shape"),
    [
        (mutants.refused_draft_redrawn, "chain-4"),
        (mutants.refused_draft_redrawn, "tree-4x3-15"),
        (mutants.all_tokens_drawn_with_one_noise, "chain-4"),
    ],
)
def test_another_distribution_is_seen(
    mutant: Mutant, shape: str, erring: Drafted, logits: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="another distribution"):
        check_tokens_follow_the_exact_distribution_with_drafts(erring, shape, "temperature-1.0", logits)
