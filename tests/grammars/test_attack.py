"""Tests of the verdict on an attack with hostile grammars."""

from __future__ import annotations

import pytest

from tests.grammars.attack import HARMLESS, HOSTILE, MAX_GROWTH_BYTES, MIN_SHARE, SILENT, harms


def test_an_attack_that_costs_others_no_more_than_harmless_grammars_do_is_no_harm() -> None:
    rates = {SILENT: [60.0, 60.0, 60.0], HARMLESS: [40.0, 20.0, 40.0], HOSTILE: [40.0, 20.0, 40.0]}
    assert harms(rates, growth_bytes=MAX_GROWTH_BYTES) == []


def test_an_attack_in_which_no_hostile_window_was_measured_shows_nothing() -> None:
    assert len(harms({SILENT: [60.0]}, growth_bytes=0)) == 1


@pytest.mark.parametrize("hostile", [[40.0, 4.0, 39.0], [4.0, 40.0, 39.0]])
def test_one_slow_window_is_noise(hostile: list[float]) -> None:
    assert harms({HARMLESS: [40.0] * 3, HOSTILE: hostile}, growth_bytes=0) == []


def test_neighbouring_windows_are_compared_because_a_machine_may_slow_down_for_a_while() -> None:
    """By the medians of all windows, the hostile ones would be as fast as the harmless ones."""
    rates = {HARMLESS: [80.0, 30.0, 80.0, 30.0, 30.0], HOSTILE: [30.0, 30.0, 30.0, 10.0, 10.0]}
    assert len(harms(rates, growth_bytes=0)) == 1


def test_slower_streams_of_others_are_a_harm() -> None:
    (harm,) = harms({HARMLESS: [40.0] * 3, HOSTILE: [40.0, 30.0, 30.0]}, growth_bytes=0)
    assert f"0.75 of its tokens/s under hostile grammars, less than {MIN_SHARE}" in harm
    assert len(harms({HARMLESS: [0.0], HOSTILE: [0.0]}, growth_bytes=0)) == 1


def test_memory_beyond_the_bounds_of_grammars_is_a_harm() -> None:
    (harm,) = harms({HARMLESS: [40.0], HOSTILE: [40.0]}, growth_bytes=MAX_GROWTH_BYTES + 1)
    assert "memory grew" in harm
