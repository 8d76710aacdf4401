"""Two prefill and two decode services under storms. The second of each kind is killed, drained and restarted."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum

from baton.service_process import ServiceProcess
from tests.soak.figures import Figures
from tests.storm.oracle import Case
from tests.storm.storm import Storm, StormReport, send_storm
from tests.support.running_pair import RunningPair, wait_until

RECOVERY_BOUND_S = 120.0
REQUESTS_A_WAVE = 200
STEADY = frozenset({"prefill-0", "decode-0"})
"""Processes that live for the whole soak. Their figures must stay flat."""


class Blow(StrEnum):
    """An interruption of one replica in the middle of a wave."""

    KILL = "kill -9 and start"
    DRAIN = "SIGTERM, wait and start"
    FREEZE = "SIGSTOP for 3 s"


BLOWS: tuple[tuple[Blow, str], ...] = (
    (Blow.KILL, "prefill-1"),
    (Blow.KILL, "decode-1"),
    (Blow.DRAIN, "prefill-1"),
    (Blow.DRAIN, "decode-1"),
    (Blow.FREEZE, "prefill-1"),
    (Blow.FREEZE, "decode-1"),
)
"""The interruptions, each with the service that it hits. Each wave takes the next one."""


@dataclass(slots=True)
class SoakReport:
    num_waves: int = 0
    by_service: dict[str, StormReport] = field(default_factory=dict)
    blows: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[Figures]] = field(default_factory=dict)

    @property
    def all_storms(self) -> StormReport:
        every = StormReport()
        for storm in self.by_service.values():
            every.add(storm)
        return every


KV_TOKENS = 512
"""The number of KV slots of a decode service."""


def soak(
    services: RunningPair, cases: Sequence[Case], *, is_over: Callable[[], bool], seed: int
) -> Iterator[SoakReport]:
    """Runs waves of requests until `is_over()`, and yields the report so far after each. Raises AssertionError if a
    wave leaves something held.
    """
    report = SoakReport(by_service={service.name: StormReport() for service in services.processes.decode})
    draw = random.Random(seed)
    while not is_over():
        blow, name = BLOWS[report.num_waves % len(BLOWS)]
        _wave(services, cases, report, blow=blow, name=name, seed=draw.randrange(1 << 30))
        wait_until(services.is_ready, about=services.loads, bound_s=RECOVERY_BOUND_S)
        wait_until(services.holds_nothing, about=services.loads, bound_s=RECOVERY_BOUND_S)
        for service in services.processes.services:
            report.samples.setdefault(service.name, []).append(Figures.of(service.pid))
        report.num_waves += 1
        yield report


def _wave(
    services: RunningPair, cases: Sequence[Case], report: SoakReport, *, blow: Blow, name: str, seed: int
) -> None:
    """Runs one wave, with `blow` in the middle. Its requests come from other threads, because a restarted service lives
    only as long as the thread that started it.
    """
    storm = Storm(num_requests=REQUESTS_A_WAVE, concurrency=24, resumes=True, seed=seed)
    with ThreadPoolExecutor(len(services.decodes)) as clients:
        sending = {
            service.name: clients.submit(
                lambda address: asyncio.run(send_storm(address, cases, storm)), service.address
            )
            for service in services.processes.decode
        }
        threading.Event().wait(random.Random(seed).uniform(0.3, 2.0))
        strike(next(service for service in services.processes.services if service.name == name), blow)
        report.blows[f"{blow}: {name}"] += 1
        results = {decode: future.result() for decode, future in sending.items()}
    for decode, result in results.items():
        assert result.num_ended == storm.num_requests, f"{decode}: {result}"
        report.by_service[decode].add(result)


def strike(service: ServiceProcess, blow: Blow) -> None:
    match blow:
        case Blow.KILL:
            service.kill()
            assert service.wait(10.0), f"{service.name} outlived a kill"
            service.start()
        case Blow.DRAIN:
            service.terminate()
            assert service.wait(60.0), f"{service.name} did not drain"
            service.start()
        case Blow.FREEZE:
            service.send_signal(signal.SIGSTOP)
            threading.Event().wait(3.0)
            service.send_signal(signal.SIGCONT)
