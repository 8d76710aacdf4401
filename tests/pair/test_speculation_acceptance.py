"""Compares the acceptance rate of drafts at each position with what the two distributions allow.

Both the target's next token and the head's guess depend on the last token only, so their distributions p and q are
known exactly. Independent draws would agree with probability sum(p q). No coupling agrees more often than 1 - TV(p, q),
where TV is the total variation distance. Draws that share their noise agree with probability sum over x of 1 / sum over
y of max(p_y / p_x, q_y / q_x), which is never below (1 - TV) / (1 + TV).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from common.attention.backend import ForwardInput
from common.sampling.params import ResolvedSampling
from decode_service.forward import worker
from decode_service.speculate.spec_info import AcceptedPath, DraftTree
from tests.pair import speculation_mutants as mutants
from tests.pair.speculation_mutants import Mutant
from tests.support.drafted import SHAPES, Drafted
from tests.support.models import SMALL_VOCAB_SIZE, next_token_logits
from tests.support.pair import PairOptions, pairs_that_keep_all

pytestmark = pytest.mark.thorough

NUM_REQUESTS = 120
NUM_FOR_A_MUTANT = 50
NEW_TOKENS = 48
NUM_POSITIONS = 4
RUNS = (("erring", 1.0), ("erring", 0.7), ("erring_layers", 1.0))
FALSE_ALARM = 1e-6 / (2 * NUM_POSITIONS * len(RUNS) + 1)
"""The probability with which one comparison may fail by chance: all of them together may do so once in 10^6 runs. Each
position of each run is compared with two bounds, and a tree's first level with one.
"""

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Probabilities that target and draft choose the same next token, [vocab] each, indexed by the last token: a lower
    bound, the expected value, and the optimum.
    """

    lower_bound: Matrix
    coupled: Matrix
    optimum: Matrix

    @classmethod
    def of(cls, p: Matrix, q: Matrix) -> Agreement:
        """Computes the probabilities from `p` and `q` [vocab, vocab], in which row t is the distribution after token
        t.
        """
        distance = np.abs(p - q).sum(axis=1) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.maximum(p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None])
        coupled = np.where((p > 0) & (q > 0), 1 / ratios.sum(axis=2), 0.0).sum(axis=1)
        return cls((1 - distance) / (1 + distance), coupled, 1 - distance)


def distributions(logits: Tensor, token_ids: Tensor, temperature: float) -> Matrix:
    """Returns the distributions after each token, [vocab, vocab]: the softmax over the columns `token_ids`, and zero in
    all other columns.
    """
    probs = np.zeros(logits.shape)
    probs[:, token_ids.numpy()] = (logits[:, token_ids].double() / temperature).softmax(dim=1).numpy()
    return probs


@dataclass(frozen=True, slots=True)
class Trial:
    """One draft that verification reached, because all drafts before it in the chain were accepted. `position` is its
    place in the chain, from 0, and `source` the token before it.
    """

    position: int
    source: int
    is_accepted: bool


@contextmanager
def trials_met() -> Iterator[list[Trial]]:
    """Yields a list that collects a Trial for every draft that verification reaches, while chains are drafted."""
    met: list[Trial] = []
    nodes: list[list[list[int]]] = []
    forward_input_of, accept = worker.forward_input_of, DraftTree.accept

    def watched_window(batch: Any, tokens: Tensor, pool: Any, group: str, **named: Any) -> ForwardInput:
        if group == "target" and batch.has_drafts:
            nodes.append(tokens.tolist())
        return forward_input_of(batch, tokens, pool, group, **named)

    def watched_accept(self: DraftTree, target_ids: Tensor) -> AcceptedPath:
        accepted = accept(self, target_ids)
        for chain, accept_len in zip(nodes.pop(), accepted.accept_lens.tolist(), strict=True):
            met.extend(
                Trial(position, chain[position], position + 1 < accept_len)
                for position in range(min(accept_len, len(chain) - 1))
            )
        return accepted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "forward_input_of", watched_window)
        patch.setattr(DraftTree, "accept", watched_accept)
        yield met


def trials_of(drafted: Drafted, shape: str, temperature: float, num_requests: int) -> list[Trial]:
    options = PairOptions(prefill_rows=40, decode_rows=40, decode_tokens=4096, **SHAPES[shape])
    with trials_met() as trials, pairs_that_keep_all() as make_pair:
        pair = make_pair(drafted.target, options, draft=drafted.head)
        for number in range(num_requests):
            sampling = ResolvedSampling(seed=number, max_tokens=NEW_TOKENS, temperature=temperature)
            pair.submit(str(number), [4 + number % 60, 4 + number // 4], sampling)
        pair.run()
    return trials


def agreement_of(drafted: Drafted, erring_model_dir: Path, temperature: float) -> Agreement:
    vocabulary = drafted.head.token_ids.new_tensor(range(SMALL_VOCAB_SIZE))
    return Agreement.of(
        distributions(next_token_logits(drafted.directory), vocabulary, temperature),
        distributions(next_token_logits(erring_model_dir), drafted.head.token_ids, temperature),
    )


def margin_of(trials: Sequence[Trial]) -> float:
    """Returns Hoeffding's bound on how far the mean of this many draws in [0, 1] is from its expected value, at
    FALSE_ALARM.
    """
    return math.sqrt(math.log(1 / FALSE_ALARM) / (2 * len(trials)))


def check_acceptance_is_what_the_distributions_allow(
    drafted: Drafted, erring_model_dir: Path, temperature: float, num_requests: int
) -> None:
    """Checks every position's acceptance rate."""
    agreement = agreement_of(drafted, erring_model_dir, temperature)
    trials = trials_of(drafted, "chain-4", temperature, num_requests)
    for position in range(NUM_POSITIONS):
        here = [trial for trial in trials if trial.position == position]
        sources = [trial.source for trial in here]
        measured = sum(trial.is_accepted for trial in here) / len(here)
        lower, coupled, optimum = (
            float(each[sources].mean()) for each in (agreement.lower_bound, agreement.coupled, agreement.optimum)
        )
        margin = margin_of(here)
        line = (
            f"draft {position + 1}: {len(here):5} trials, bound {lower:.3f}, coupled {coupled:.3f}, "
            f"measured {measured:.3f} +- {margin:.3f}, optimum {optimum:.3f}"
        )
        assert lower <= coupled <= optimum
        assert measured >= lower - margin, f"accepted less than the bound: {line}"
        assert measured <= optimum + margin, f"accepted more than the optimum: {line}"
        assert abs(measured - coupled) <= margin, f"accepted otherwise than with shared noise: {line}"


@pytest.mark.parametrize(("head", "temperature"), RUNS)
def test_acceptance_lies_between_the_bound_and_the_optimum(
    head: str, temperature: float, erring_model_dir: Path, request: pytest.FixtureRequest
) -> None:
    drafted: Drafted = request.getfixturevalue(head)
    check_acceptance_is_what_the_distributions_allow(drafted, erring_model_dir, temperature, NUM_REQUESTS)


@pytest.mark.parametrize(
    ("mutant", "head", "symptom"),
    [
        (mutants.drafts_draw_one_position_late, "erring", "less than the bound: draft 1"),
        (mutants.drafts_draw_by_place_in_their_vocabulary, "erring", "less than the bound: draft 1"),
        (mutants.ids_not_shifted_per_layer, "erring_layers", "less than the bound: draft 2"),
    ],
)
def test_it_is_seen(
    mutant: Mutant,
    head: str,
    symptom: str,
    erring_model_dir: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafted: Drafted = request.getfixturevalue(head)
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=symptom):
        check_acceptance_is_what_the_distributions_allow(drafted, erring_model_dir, 1.0, NUM_FOR_A_MUTANT)


# ---- siblings -----------------------------------------------------------------------------------------------------


def check_siblings_are_worth_more_than_any_single_draft(erring: Drafted, erring_model_dir: Path) -> None:
    """Checks that the first level of a draft tree contains the target's token more often than any single draft could
    equal it: the tree drafts the tokens that the noise favours.
    """
    trials = [trial for trial in trials_of(erring, "tree-4x3-15", 1.0, NUM_FOR_A_MUTANT) if trial.position == 0]
    optimum = float(agreement_of(erring, erring_model_dir, 1.0).optimum[[trial.source for trial in trials]].mean())
    measured = sum(trial.is_accepted for trial in trials) / len(trials)
    line = (
        f"{len(trials)} trials, measured {measured:.3f} +- {margin_of(trials):.3f}, one draft's optimum {optimum:.3f}"
    )
    assert measured - margin_of(trials) > optimum, f"siblings are worth no more than one draft: {line}"


def test_siblings_are_worth_more_than_any_single_draft(erring: Drafted, erring_model_dir: Path) -> None:
    check_siblings_are_worth_more_than_any_single_draft(erring, erring_model_dir)


def test_it_is_seen_when_siblings_share_their_noise(
    erring: Drafted, erring_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutants.drafts_draw_all_tokens_with_one_noise(monkeypatch)
    with pytest.raises(AssertionError, match="worth no more than one draft"):
        check_siblings_are_worth_more_than_any_single_draft(erring, erring_model_dir)
