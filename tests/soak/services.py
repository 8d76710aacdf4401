"""Two prefill and two decode services under storms; the second of each is killed, drained and started again."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from baton.client import Client, PrefillClient
from baton.local_pair import LocalPair
from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE, ServiceProcess
from tests.faults.plan import FaultPlan
from tests.soak.figures import Figures
from tests.storm.oracle import Case
from tests.storm.pairs import TEST_BUILD, Models, Setting, faults_everywhere
from tests.storm.storm import Storm, StormReport, send_storm
from tests.support.running_pair import COMMON_ARGS, RECONNECT_AT_ONCE, is_empty, wait_until

RECOVERY_BOUND_S = 120.0
REQUESTS_A_WAVE = 200
STEADY = frozenset({"prefill-0", "decode-0"})
"""Processes that live from the beginning to the end: theirs are the figures that must be flat."""


class Blow(StrEnum):
    """What happens to a replica in the middle of a wave."""

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
"""One each wave, in turn."""


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


class Services:
    """Running, with `plan` of faults."""

    def __init__(self, processes: LocalPair, clients: Sequence[Client | PrefillClient], plan: FaultPlan) -> None:
        self.plan = plan
        self._processes = processes
        self._clients = dict(zip(processes.services, clients, strict=True))

    @property
    def by_name(self) -> dict[str, ServiceProcess]:
        return {service.name: service for service in self._processes.services}

    @property
    def prefills(self) -> tuple[ServiceProcess, ...]:
        return self._processes.prefill

    @property
    def decodes(self) -> tuple[ServiceProcess, ...]:
        return self._processes.decode

    def hold_nothing(self) -> bool:
        return all(is_empty(client.load()) for client in self._clients.values())

    def are_ready(self) -> bool:
        return all(
            client.health(READY_SERVICE[service.role]) is HealthStatus.SERVING
            for service, client in self._clients.items()
            if isinstance(client, Client)
        )

    def loads(self) -> list[object]:
        return [client.load() for client in self._clients.values()]


@contextmanager
def running_services(models: Models, setting: Setting, seed: int, directory: Path) -> Iterator[Services]:
    plan = faults_everywhere(seed, setting)
    shared = (*COMMON_ARGS, f"--faults={plan.write(directory / 'faults.json')}", "--max-rows=32")
    if setting.speculates:
        shared += (f"--draft={models.head}",)
    processes = LocalPair(
        model=str(models.target),
        dtype="float32",
        num_prefill=2,
        num_decode=2,
        modules=TEST_BUILD,
        prefill_args=(
            *shared,
            "--chunk-tokens=16",
            "--max-batch-tokens=128",
            "--max-segment-bytes=65536",
            *setting.prefill_args,
        ),
        decode_args=(
            *shared,
            "--max-kv-tokens=512",
            "--max-handoff-attempts=20",
            "--prefill-timeout-s=30",
            *([] if setting.overlap else ["--disabled-fast-paths=overlap"]),
            *(["--num-draft-tokens=3", "--no-adaptive-depth"] if setting.speculates else []),
        ),
        log_dir=directory / "logs",
    )
    with processes, ExitStack() as stack:
        clients = [
            stack.enter_context(
                (Client if service.role == "decode" else PrefillClient)(
                    service.address, channel_overrides=RECONNECT_AT_ONCE
                )
            )
            for service in processes.services
        ]
        yield Services(processes, clients, plan)


def soak(services: Services, cases: Sequence[Case], *, is_over: Callable[[], bool], seed: int) -> Iterator[SoakReport]:
    """Wave after wave until `is_over`; yields the report so far after each. AssertionError when something is left."""
    report = SoakReport(by_service={service.name: StormReport() for service in services.decodes})
    draw = random.Random(seed)
    while not is_over():
        blow, name = BLOWS[report.num_waves % len(BLOWS)]
        _wave(services, cases, report, blow=blow, name=name, seed=draw.randrange(1 << 30))
        wait_until(services.are_ready, about=services.loads, bound_s=RECOVERY_BOUND_S)
        wait_until(services.hold_nothing, about=services.loads, bound_s=RECOVERY_BOUND_S)
        for service in services.by_name.values():
            report.samples.setdefault(service.name, []).append(Figures.of(service.pid))
        report.num_waves += 1
        yield report


def _wave(services: Services, cases: Sequence[Case], report: SoakReport, *, blow: Blow, name: str, seed: int) -> None:
    """Requests come from threads of their own: a service started again lives as long as the thread that starts it."""
    storm = Storm(num_requests=REQUESTS_A_WAVE, concurrency=24, resumes=True, seed=seed)
    with ThreadPoolExecutor(len(services.decodes)) as clients:
        sending = {
            service.name: clients.submit(
                lambda address: asyncio.run(send_storm(address, cases, storm)), service.address
            )
            for service in services.decodes
        }
        threading.Event().wait(random.Random(seed).uniform(0.3, 2.0))
        strike(services.by_name[name], blow)
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
