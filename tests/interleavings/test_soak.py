"""Tests that the soak counts different orders, stops when it should, and reports a failing order as a script."""

from __future__ import annotations

import random
import re
from collections import Counter
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine.mutants import rows
from tests.interleavings import replay, scenarios, soak
from tests.interleavings.random_lives import RandomLives
from tests.interleavings.scenarios import RETRIED, Scenario
from tests.interleavings.soak import Soak, Spell

SMALL = Scenario(scenarios.one_request, 1, 16)
LARGE = Scenario(scenarios.two_requests, 2, 60)
ABORTED = Scenario(scenarios.one_aborted, 1, 16)


def run(soak: Soak) -> Soak:
    with ThreadPoolExecutor(1) as executor:
        soak.run(executor, num_at_once=1)
    return soak


@pytest.mark.thorough
def test_it_goes_on_until_enough_orders_differ() -> None:
    done = run(Soak(small=[SMALL], large=[LARGE, ABORTED], num_wanted=70))
    small, *large = done.tallies.values()
    assert (small.num_interleavings, small.is_exhaustive) == (7, True)
    assert all(10 < tally.num_interleavings < tally.num_runs for tally in large), "some of its orders were the same"
    assert done.is_reached and not done.shortcomings
    assert 70 <= done.num_interleavings < 130
    assert f"| together | {7 + sum(tally.num_runs for tally in large)} | {done.num_interleavings} |" in done.table()


@pytest.mark.thorough
def test_a_scenario_of_which_all_orders_were_met_is_left() -> None:
    """More random orders are counted than exploring runs, up to twice as many, because the engine may idle once
    more.
    """
    done = run(Soak(small=[], large=[SMALL], num_wanted=100))
    assert 7 < done.num_interleavings <= 14 and not done.is_reached
    assert done.shortcomings == [f"{done.num_interleavings} interleavings of 100: time, or orders, were short"]


@pytest.mark.thorough
def test_lives_are_seldom_the_same() -> None:
    (drawn,) = run(Soak(small=[], large=[RandomLives()], num_wanted=60)).tallies.values()
    assert 0.9 * drawn.num_runs < drawn.num_interleavings <= drawn.num_runs == 80


class CountedSpells(Executor):
    """Stands in for the worker processes and runs nothing. A spell (a worker's batch of orders) ends, after a second,
    once `num_at_once` spells run together.
    """

    def __init__(self, num_at_once: int) -> None:
        self.num_at_once = num_at_once
        self.of: Counter[str] = Counter()
        self._running: list[Future[Spell]] = []

    def submit(self, run: Any, explored: Any, *seed: Any) -> Any:
        self.of[explored.name] += 1
        begun: Future[Spell] = Future()
        self._running.append(begun)
        if len(self._running) == self.num_at_once:
            for future in self._running:
                future.set_result(Spell(40, frozenset(random.getrandbits(64) for _ in range(40)), 1.0))
            self._running.clear()
        return begun


def test_lives_get_four_fifths_of_the_time_in_processes_beside_each_other() -> None:
    spells = CountedSpells(2)
    Soak(small=[], large=[LARGE, ABORTED, RandomLives()], num_wanted=4000).run(spells, num_at_once=2)
    assert spells.of.total() == pytest.approx(100, abs=2)
    assert spells.of["random_lives"] == pytest.approx(80, abs=3)
    assert spells.of[LARGE.name] == pytest.approx(10, abs=2)


@pytest.mark.thorough
def test_lives_in_which_little_happens_fall_short() -> None:
    lives = RandomLives(num_telling=40, some_have=frozenset({RETRIED, "a request was lost"}))
    done = run(Soak(small=[], large=[lives], num_wanted=30))
    assert done.is_reached
    assert done.shortcomings == ["random_lives: in none a request was lost"]
    assert f"{done.tallies[lives].witnessed[RETRIED]} x {RETRIED}" in done.table()


def test_it_ends_with_its_time() -> None:
    done = run(Soak(small=[SMALL], large=[LARGE], num_wanted=90, minutes=0.0))
    assert done.num_interleavings == 0 and not done.is_reached
    assert "| not run |" in done.table()


@pytest.mark.parametrize(
    ("small", "large"),
    [([ABORTED], []), ([], [ABORTED]), ([], [RandomLives()])],
    ids=["all orders", "random orders", "random lives"],
)
def test_a_failure_is_told_as_a_script(
    small: list[Scenario],
    large: list[Scenario | RandomLives],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        rows.quarantine_skipped(patch)
        (failure,) = run(Soak(small=small, large=large, num_wanted=1000)).shortcomings
        told = re.fullmatch(
            r"(?s)(\S+): a race for .*\nreplay: python -m tests.interleavings.replay \1 '(.*)'", failure
        )
        assert told is not None
        assert replay.main([told[1], told[2]]) == 1
        assert "a race for" in capsys.readouterr().err
    assert replay.main([told[1], told[2]]) == 0
    assert capsys.readouterr().out == "clean\n"


def test_a_number_of_orders_that_is_not_the_known_one_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(soak.EXHAUSTIVE, SMALL, 8)
    (failure,) = run(Soak(small=[SMALL], large=[], num_wanted=1)).failures
    assert failure == f"{SMALL.name}: 7 orders, and 8 are known"


@pytest.mark.thorough
def test_it_runs_in_processes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(soak, "EXHAUSTIVE", {SMALL: 7})
    monkeypatch.setattr(soak, "LARGE", ())
    assert soak.main(["--interleavings", "7"]) == 0
    assert "| together | 7 | 7 |" in capsys.readouterr().out
