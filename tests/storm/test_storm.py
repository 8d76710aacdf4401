"""Requests that come, go and are retracted while frames, memory, streams and forwards fail: each ends once, and right.

`python -m tests.storm` sends 1,000 requests in each of four settings.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import wait_until
from tests.faults.plan import FaultPlan
from tests.storm.oracle import Case, make_cases
from tests.storm.pairs import Models, Setting, disturbed_pair, faults_everywhere, frame_faults
from tests.storm.storm import Storm, StormReport, send_storm
from tests.storm.verdict import faults_of, problems_of

STORM = Storm(num_requests=160)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models.save(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def cases(models: Models) -> list[Case]:
    return make_cases(models.target, 20)


@pytest.mark.parametrize(
    ("setting", "plan"),
    [
        (Setting(overlap=True, speculates=True), frame_faults),
        (Setting(overlap=False, speculates=False), faults_everywhere),
    ],
    ids=["frames-overlap-drafts", "everywhere"],
)
def test_each_request_ends_once_and_with_its_own_tokens(
    models: Models, cases: list[Case], tmp_path: Path, setting: Setting, plan: Callable[[int], FaultPlan]
) -> None:
    with disturbed_pair(models, setting, plan(0), tmp_path) as pair:
        report = asyncio.run(send_storm(pair.client.address, cases, STORM))
        wait_until(pair.holds_nothing, about=lambda: (pair.load(), pair.prefill_load()))
        faults = faults_of(pair.processes.services)
    assert problems_of(report, faults, num_requests=STORM.num_requests, speculates=setting.speculates) == []
    assert report.num_finished > STORM.num_requests // 3, report


def test_ends_that_no_fault_explains_are_told() -> None:
    def problems(**changes: Any) -> list[str]:
        as_it_should = {"num_finished": 6, "num_aborted": 2, "num_retractions": 1, "num_attempts": 8, "num_accepted": 3}
        report = StormReport(**{**as_it_should, "failed": Counter({"INTERNAL ENGINE_FAULT": 2}), **changes})
        return problems_of(report, faults, num_requests=10, speculates=True)

    faults = Counter({("handoff.frame", "duplicate"): 2, ("handoff.frame", "drop"): 5})
    assert problems() == []
    for changes, told in (
        ({"wrong": ["case 3: tokens"]}, "case 3"),
        ({"num_finished": 7}, "11 ends of 10 requests"),
        ({"failed": Counter({"INTERNAL PROTOCOL": 2})}, "2 failed with INTERNAL PROTOCOL"),
        ({"failed": Counter({"INTERNAL ENGINE_FAULT": 3}), "num_finished": 5}, "3 failed, .* explain 2"),
        ({"num_retractions": 0}, "no request was retracted"),
        ({"num_accepted": 0}, "no request had a draft accepted"),
        ({"num_attempts": 6}, "no request was handed over again"),
    ):
        (problem,) = problems(**changes)
        assert re.search(told, problem)
