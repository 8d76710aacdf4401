"""Services end at named points in the middle of requests and are started again: clients that resume lose nothing."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.e2e.running import wait_until
from tests.faults.plan import Action, Fault, FaultPlan
from tests.storm.oracle import make_cases
from tests.storm.pairs import Models, Setting, disturbed_pair
from tests.storm.storm import Storm, send_storm

STORM = Storm(num_requests=60, concurrency=12, abort_share=0.0, resumes=True)
KILLS = FaultPlan(
    faults=(
        Fault(point="stream.forward.verify", action=Action.KILL, at=20),  # in the decode service only
        Fault(point="stream.sending.copy_out", action=Action.KILL, at=40),  # in the prefill service only
    )
)


def test_requests_go_on_after_either_service_ended_in_the_middle_of_them(tmp_path: Path) -> None:
    models = Models.save(tmp_path)
    cases = make_cases(models.target, 12)
    with disturbed_pair(models, Setting(overlap=True, speculates=True), KILLS, tmp_path) as pair:
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
