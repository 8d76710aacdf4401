"""Tests in which services die at named points in the middle of requests and are restarted. Clients that resume lose
nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.local_pair import LocalPair
from tests.faults.plan import Action, Fault, FaultPlan
from tests.storm.oracle import Case, make_cases
from tests.storm.pairs import Models, Setting, disturbed_pair
from tests.storm.storm import Storm, send_storm
from tests.support.running_pair import wait_until

pytestmark = pytest.mark.thorough

STORM = Storm(num_requests=60, concurrency=12, abort_share=0.0, resumes=True)
COPIES = Setting(overlap=True, speculates=True)
LOANS = Setting(overlap=True, speculates=True, shares_memory=True)
KILLS = {
    COPIES: (
        Fault(point="stream.forward.verify", action=Action.KILL, at=20),  # in the decode service only
        Fault(point="stream.sending.copy_out", action=Action.KILL, at=40),  # in the prefill service only
    ),
    LOANS: (
        Fault(point="stream.landing.land", action=Action.STALL, rate=0.5, seconds=0.02),  # so that loans are out
        Fault(point="shared_memory.read", action=Action.KILL, at=40),  # in the decode service, which reads
        Fault(point="shared_memory.lent", action=Action.KILL, at=60),  # in the prefill service, which lends
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models.save(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def cases(models: Models) -> list[Case]:
    return make_cases(models.target, 12)


@pytest.mark.parametrize("setting", KILLS, ids=["copies", "shared-memory"])
def test_requests_go_on_after_either_service_ended_in_the_middle_of_them(
    models: Models, cases: list[Case], forked: Callable[..., LocalPair], tmp_path: Path, setting: Setting
) -> None:
    plan = FaultPlan(faults=KILLS[setting])
    with disturbed_pair(models, setting, plan, tmp_path, kind=forked) as pair:
        with ThreadPoolExecutor(1) as clients:
            sending = clients.submit(lambda: asyncio.run(send_storm(pair.client.address, cases, STORM)))
            for service in (*pair.processes.decode, *pair.processes.prefill):
                wait_until(lambda service=service: not service.is_running, about=service.log_tail)
                assert not sending.done(), "it was killed when nothing ran any more"
                FaultPlan().write(tmp_path / "faults.json")  # once is enough
                service.start()
            report = sending.result()
        wait_until(pair.holds_nothing, about=lambda: (pair.load(), pair.prefill_load()))
    assert report.wrong == []
    assert (report.num_finished, report.failed) == (STORM.num_requests, {})
