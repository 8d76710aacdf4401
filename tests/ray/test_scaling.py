"""Tests of the number of replicas that a load asks for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from baton.server_info import InferenceLoad
from baton_ray.scaling import LOAD, LoadPolicy
from baton_ray.service import decode_load
from common.telemetry.stats import PoolCounts

IDLE = PoolCounts(total=8, free=8)
SLOTS = replace(IDLE, total=100, free=20, cached=80)
LOAD_OF_NONE = InferenceLoad("d", IDLE, SLOTS, 0, 0, 0, (), 0, 0)


@dataclass(frozen=True)
class Context:
    """What the policy reads of Serve's context."""

    aggregated_metrics: dict[str, dict[str, float]]
    target_num_replicas: int = 2
    current_num_replicas: int = 2


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [([0.7, 0.7], 2.0), ([1.4, 0.7, 0.7], 4.0), ([0.0, 0.0], 0.0), ([0.35, 0.0], 0.5)],
)
def test_there_should_be_as_many_replicas_as_have_the_load_at_its_target(loads: list[float], wanted: float) -> None:
    context = Context({LOAD: {f"replica {i}": load for i, load in enumerate(loads)}})
    assert LoadPolicy(target=0.7)(context) == (pytest.approx(wanted), {})


@pytest.mark.parametrize("metrics", [{}, {LOAD: {}}])
def test_while_no_load_is_known_the_number_stays(metrics: dict[str, dict[str, float]]) -> None:
    assert LoadPolicy(target=0.7)(Context(metrics)) == (2, {})


@pytest.mark.parametrize(("loads", "wanted"), [([0.0], 2), ([0.7], 2), ([1.4], 2), ([2.1], 3)])
def test_while_a_replica_reports_nothing_the_number_does_not_fall(loads: list[float], wanted: float) -> None:
    context = Context({LOAD: {f"replica {i}": load for i, load in enumerate(loads)}})
    assert LoadPolicy(target=0.7)(context) == (wanted, {})


def test_the_error_of_a_sum_asks_for_no_replica_more() -> None:
    loads = dict.fromkeys("abcdef", 0.7)
    assert sum(loads.values()) / 0.7 > 6, "the sum has an error"
    context = Context({LOAD: loads}, target_num_replicas=6, current_num_replicas=6)
    assert math.ceil(LoadPolicy(target=0.7)(context)[0]) == 6


@pytest.mark.parametrize("target", [0.0, -1.0, float("nan")])
def test_a_target_is_above_nothing(target: float) -> None:
    with pytest.raises(ValueError, match="not above 0"):
        LoadPolicy(target=target)


@pytest.mark.parametrize(
    ("load", "share"),
    [
        (LOAD_OF_NONE, 0.0),
        (replace(LOAD_OF_NONE, rows=replace(IDLE, free=6, running=2)), 0.25),
        (replace(LOAD_OF_NONE, slots=replace(SLOTS, free=10, cached=40, running=50)), 0.5),
        (replace(LOAD_OF_NONE, rows=replace(IDLE, free=0, running=8), num_queued=12), 2.5),
    ],
    ids=["what is cached is free", "rows", "slots", "queue"],
)
def test_the_load_of_decode_is_the_share_in_use_and_what_is_queued(load: InferenceLoad, share: float) -> None:
    assert decode_load(load) == share
