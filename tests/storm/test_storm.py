"""Requests that come, go and are retracted while frames, memory, streams and forwards fail: each ends once, and right.

`python -m tests.storm` sends 1,000 requests in each of four settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.running import wait_until
from tests.faults.plan import FaultPlan
from tests.storm.oracle import Case, make_cases
from tests.storm.pairs import Models, Setting, disturbed_pair, faults_everywhere, frame_faults, num_faults
from tests.storm.storm import Storm, send_storm

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
        num_injected = num_faults(pair)
    assert report.wrong == []
    assert report.num_ended == STORM.num_requests
    assert set(report.failed) <= {"INTERNAL ENGINE_FAULT"}, report.failed
    assert report.num_finished > STORM.num_requests // 3, report
    assert report.num_aborted > 10, "clients left"
    assert num_injected > 10, "faults happened"
    assert report.num_attempts > report.num_finished, "rows were handed over again"
    assert report.num_retractions > 0, "slots ran out"
    assert (report.num_accepted > 0) == setting.speculates, "drafts were accepted"
