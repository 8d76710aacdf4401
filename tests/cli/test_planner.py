"""Tests of the planner's advice: what a load wants, and that it does not go back and forth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.planner import HIGH, LOW, MIN_SAMPLES, Advice, DecodeSample, PrefillSample, advise
from common.role import Role

NUM_LOOKS = 64
Load = Callable[[int], float]


def prefill(load: Load, *, backlog: Load = lambda look: 0.0, tells_rate: bool = True) -> list[PrefillSample]:
    """A prefill service that computes in each look for which `load` is 1, 1,000 tokens a second, and has `backlog`
    tokens left.
    """
    num_computed, samples = 0, []
    for look in range(NUM_LOOKS):
        is_computing = load(look) > 0
        samples.append(
            PrefillSample(
                float(look), "same", True, is_computing, int(backlog(look)), num_computed if tells_rate else None
            )
        )
        num_computed += 1000 * is_computing
    return samples


def decode(load: Load, *, arriving: int = 0, queued: int = 0) -> list[DecodeSample]:
    """A decode service of 100 rows, of which running requests hold the share `load`."""
    return [
        DecodeSample(float(look), "same", True, load(look), round(100 * load(look)), arriving, queued, 100)
        for look in range(NUM_LOOKS)
    ]


def steady(value: float) -> Load:
    return lambda look: value


def share_of_looks(share: float) -> Load:
    """1 in this share of the looks, evenly spread, else 0."""
    return lambda look: float(math.floor((look + 1) * share) > math.floor(look * share))


def alternating(low: float, high: float, *, period: int) -> Load:
    return lambda look: high if look // (period // 2) % 2 else low


def wanted(advice: Advice) -> tuple[int | None, int | None]:
    return advice.prefill.wanted, advice.decode.wanted


def test_a_load_within_bounds_wants_what_is_there() -> None:
    advice = advise({"p": prefill(share_of_looks(0.6))}, {"d": decode(steady(0.6))})
    assert wanted(advice) == (1, 1) and not advice.switches and not advice.missing and not advice.holds
    assert advice.prefill.mean == pytest.approx(0.6, abs=0.05) and advice.decode.mean == pytest.approx(0.6)


def test_one_kind_that_is_short_gets_the_least_busy_of_the_other_where_that_has_too_many() -> None:
    advice = advise(
        {"p": prefill(steady(1.0))},
        {"d-0": decode(steady(0.2)), "d-1": decode(steady(0.05)), "d-2": decode(steady(0.1))},
    )
    assert wanted(advice) == (2, 1)
    assert advice.switches == {"d-1": Role.PREFILL}


def test_a_kind_that_is_short_gets_none_where_the_other_needs_all_of_its_own() -> None:
    advice = advise({"p": prefill(steady(1.0))}, {"d": decode(steady(0.9))})
    assert wanted(advice) == (2, 2) and not advice.switches


def test_prompts_that_wait_count_as_far_as_they_would_take_a_window_to_work_off() -> None:
    some = advise({"p": prefill(steady(1.0), backlog=steady(10_000))}, {"d": decode(steady(0.6))})
    many = advise({"p": prefill(steady(1.0), backlog=steady(120_000))}, {"d": decode(steady(0.6))})
    assert (some.prefill.wanted, many.prefill.wanted) == (2, 4)


def test_rows_that_wait_for_a_prefill_service_do_not_count_as_use_of_decode() -> None:
    waiting = advise({"p": prefill(steady(1.0))}, {"d": decode(steady(0.1), arriving=90, queued=200)})
    running = advise({"p": prefill(steady(1.0))}, {"d": decode(steady(1.0), queued=200)})
    assert (waiting.decode.wanted, running.decode.wanted) == (1, 4)


@pytest.mark.parametrize("period", [2, 4, 8, 16, 32, 64])
def test_a_load_that_alternates_within_the_window_does_not_flap(period: int) -> None:
    """Whichever moment the window begins at, what is there stays, once it is in between."""
    for start in range(period):
        busy = alternating(0.0, 1.0, period=period)
        used = alternating(0.2, 0.9, period=period)

        def late(load: Load, start: int = start) -> Load:
            return lambda look: load(look + start)

        advice = advise({"p": prefill(late(busy))}, {"d": decode(late(used))})
        assert wanted(advice) == (1, 1), start


@pytest.mark.parametrize("share", [0.05, 0.3, 0.45, 0.55, 0.7, 0.85, 1.3, 2.1, 2.6, 3.5])
def test_advice_that_was_followed_does_not_call_for_its_undoing(share: float) -> None:
    """The same work is spread over as many services as were advised, from any number of them."""
    for num_first in range(1, 9):
        num, seen = num_first, [num_first]
        for _ in range(6):
            each = {f"d-{place}": decode(steady(min(1.0, share / num))) for place in range(num)}
            num += advise({"p": prefill(share_of_looks(0.6))}, each).decode.num_more
            seen.append(num)
        steps = [after - before for before, after in itertools.pairwise(seen) if after != before]
        assert all(step > 0 for step in steps) or all(step < 0 for step in steps), seen
        assert seen[-1] == seen[-2], seen


def test_between_what_is_too_few_and_what_is_too_many_any_number_stays() -> None:
    demand = 1.2
    for num in range(1, 6):
        each = {f"d-{place}": decode(steady(min(1.0, demand / num))) for place in range(num)}
        stays = advise({"p": prefill(share_of_looks(0.6))}, each).decode.wanted == num
        assert stays == (demand / HIGH <= num <= math.ceil(demand / LOW)), num


def test_a_service_that_just_changed_its_role_or_began_anew_holds_all_advice() -> None:
    busy, idle = {"p": prefill(steady(1.0))}, decode(steady(0.01))
    changed = advise({**busy, "d-1": prefill(steady(0.0))}, {"d-0": idle, "d-1": idle})
    assert changed.holds == "d-1 changed its role within the window" and wanted(changed) == (None, None)

    restarted = [*idle[:-1], DecodeSample(99.0, "another", True, 0.0, 0, 0, 0, 100)]
    anew = advise(busy, {"d-0": idle, "d-1": restarted})
    assert anew.holds == "d-1 began anew within the window" and wanted(anew) == (None, None) and not anew.switches


def test_a_service_that_misses_answers_holds_all_advice() -> None:
    busy, idle = {"p": prefill(steady(1.0))}, {"d-0": decode(steady(0.01)), "d-1": decode(steady(0.01))}
    missed = advise(busy, idle, missing=["1 of 64 answers of d-1: gone"])
    assert missed.holds == "not every service answered all the time"
    assert wanted(missed) == (None, None) and not missed.switches


def test_a_service_that_is_not_ready_or_changing_its_role_holds_all_advice() -> None:
    busy, idle = {"p": prefill(steady(1.0))}, decode(steady(0.01))
    leaving = [*idle[:-1], replace(idle[-1], is_settled=False)]
    advice = advise(busy, {"d-0": idle, "d-1": leaving})
    assert advice.holds == "d-1 was not ready or changed its role within the window" and wanted(advice) == (None, None)


def test_a_burst_that_waits_counts_at_the_rate_at_which_tokens_are_computed() -> None:
    """1,000,000 tokens arrive at once at a service that computes 10,000 a second, and is watched for 40 s."""
    burst = [PrefillSample(look / 2, "same", True, True, 1_000_000 - 5_000 * look, 5_000 * look) for look in range(81)]
    advice = advise({"p": burst}, {"d": decode(steady(0.6))[:MIN_SAMPLES]})
    assert advice.prefill.mean == pytest.approx(1 + 80 / 40, abs=0.1)  # 80 s are left on average


def test_too_few_samples_hold_the_advice() -> None:
    few = advise({"p": prefill(steady(1.0))[: MIN_SAMPLES - 1]}, {"d": decode(steady(0.5))})
    assert few.holds == f"p gave {MIN_SAMPLES - 1} samples, and {MIN_SAMPLES} are needed"
    assert wanted(few) == (None, None)


def test_what_is_not_known_is_said() -> None:
    nobody = advise({}, {"d": decode(steady(0.5))}, missing=["1 of 64 answers of p: gone"])
    assert nobody.missing == ("1 of 64 answers of p: gone", "the demand for prefill: no prefill service answered")
    assert nobody.holds == "not every service answered all the time"

    no_rate = advise({"p": prefill(steady(1.0), backlog=steady(9), tells_rate=False)}, {"d": decode(steady(0.5))})
    assert len(no_rate.missing) == 1 and "num_computed_tokens" in no_rate.missing[0]
    assert no_rate.prefill.wanted == 2  # it is busy all the time, whatever waits
