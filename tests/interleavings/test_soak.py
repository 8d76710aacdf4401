"""The soak counts orders that differ, stops when it should, and tells a failing order so that it can be run again."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.mutants import rows
from tests.interleavings import replay, scenarios, soak
from tests.interleavings.scenarios import Scenario
from tests.interleavings.soak import Soak

SMALL = Scenario(scenarios.one_request, 1, 16)
LARGE = Scenario(scenarios.two_requests, 2, 60)
ABORTED = Scenario(scenarios.one_aborted, 1, 16)


def run(soak: Soak) -> Soak:
    with ThreadPoolExecutor(1) as executor:
        soak.run(executor, num_at_once=1)
    return soak


def test_it_goes_on_until_enough_orders_differ() -> None:
    done = run(Soak(small=[SMALL], large=[LARGE, ABORTED], num_wanted=70))
    small, *large = done.tallies.values()
    assert (small.num_interleavings, small.is_exhaustive) == (7, True)
    assert all(10 < tally.num_interleavings < tally.num_runs for tally in large), "some of its orders were the same"
    assert done.is_reached and not done.shortcomings
    assert 70 <= done.num_interleavings < 130
    assert f"| together | {7 + sum(tally.num_runs for tally in large)} | {done.num_interleavings} |" in done.table()


def test_a_scenario_of_which_all_orders_were_met_is_left() -> None:
    """They are twice as many as exploring runs: the engine may idle once more."""
    done = run(Soak(small=[], large=[SMALL], num_wanted=100))
    assert 7 < done.num_interleavings <= 14 and not done.is_reached
    assert done.shortcomings == [f"{done.num_interleavings} interleavings of 100: time, or orders, were short"]


def test_it_ends_with_its_time() -> None:
    done = run(Soak(small=[SMALL], large=[LARGE], num_wanted=90, minutes=0.0))
    assert done.num_interleavings == 0 and not done.is_reached
    assert "| not run |" in done.table()


@pytest.mark.parametrize(("small", "large"), [([ABORTED], []), ([], [ABORTED])], ids=["all orders", "random orders"])
def test_a_failure_is_told_as_a_script(
    small: list[Scenario],
    large: list[Scenario],
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


def test_it_runs_in_processes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(soak, "EXHAUSTIVE", {SMALL: 7})
    monkeypatch.setattr(soak, "LARGE", ())
    assert soak.main(["--interleavings", "7"]) == 0
    assert "| together | 7 | 7 |" in capsys.readouterr().out
