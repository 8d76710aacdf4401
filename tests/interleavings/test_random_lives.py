"""Random lives, each drawn from a seed and run in one order. A life that fails is named with a script to replay:
`python -m tests.interleavings.replay random_life-SEED 'SCRIPT'`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.engine.mutants import local_prefill, prefixes
from tests.engine.mutants.kinds import Mutant, name_of
from tests.interleavings.explorer import Failure, RandomOrder, random_order, shorten
from tests.interleavings.random_lives import ENDINGS, REPLICAS, SALTS, RandomLife
from tests.interleavings.scenarios import COMPUTED_HERE, EVICTED, LAUNCHED_BESIDE_A_CHUNK, RETRIED, REUSED

NUM_LIVES = 100


def orders_of_lives(num_lives: int) -> Iterator[tuple[RandomLife, RandomOrder]]:
    """Yields lives of a sample, with one order of each."""
    for number in range(num_lives):
        life = RandomLife(f"0/2/{number}")
        yield life, random_order(life.program, life.seed)


@pytest.mark.parametrize("num_lives", [10, pytest.param(NUM_LIVES, marks=pytest.mark.thorough)])
def test_any_life_comes_to_the_oracles_tokens_in_any_order(num_lives: int) -> None:
    witnessed = Counter[str]()
    for life, order in orders_of_lives(num_lives):
        if order.error is not None:
            raise AssertionError(f"{life.name} {shorten(life.program, Failure(order.script, order.error, 1))}")
        witnessed.update(order.witnessed)
    often = min(witnessed[what] for what in (REUSED, EVICTED, COMPUTED_HERE, RETRIED))
    assert often >= num_lives // 6 and witnessed[LAUNCHED_BESIDE_A_CHUNK], f"too little happened: {witnessed}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mutant", "symptom"),
    [(prefixes.prefix_is_found_and_not_held, "decoded wrongly"), (local_prefill.fallback_is_forgotten, "not over")],
    ids=name_of,
)
def test_some_life_shows_a_broken_cache_or_local_prefill(
    mutant: Mutant, symptom: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    errors = (order.error for _, order in orders_of_lives(NUM_LIVES) if order.error is not None)
    error = next(errors, None)
    assert error is not None and re.search(symptom, str(error)), error


def test_a_seed_draws_the_same_life_again_and_another_seed_another() -> None:
    assert RandomLife("0/1") == RandomLife("0/1")
    lives = {RandomLife(f"0/{number}").life for number in range(100)}
    assert len(lives) == 100
    assert {request.ending for life in lives for request in life.requests} == {None, *ENDINGS}
    assert {request.cache_salt for life in lives for request in life.requests} == {*SALTS}
    assert {life.replica for life in lives} == {*REPLICAS}
    assert {len(life.requests) for life in lives} == {2, 3, 4}
