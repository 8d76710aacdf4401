"""Switches the role of one of three services back and forth under load, and measures what it costs and leaves behind.

python -m benchmarks.role_switches

One prefill and one decode service keep their roles. The third, which both of them and the clients list, is switched.
The first case is switched most often. The others are switched a few times, with a feature each.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread

import psutil  # type: ignore[import-untyped]

from baton.client import AsyncClient, Client
from baton.errors import BatonError
from baton.events import Completion
from baton.free_ports import free_ports
from baton.roles import Role, RoleClient
from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE, ServiceProcess
from benchmarks.benchmark_run import BenchmarkRun
from tests.e2e.load import Workload, assert_same
from tests.support.draft_heads import save_eagle3_head
from tests.support.models import save_tiny_model
from tests.support.running_pair import BOUND_S, wait_until

WORKLOAD = Workload(prompt_tokens=60, new_tokens=40)
NUM_STREAMS = 6
SETTLING_SWITCHES = 10
"""The first switches, which load code and fill caches. What is left behind is counted from then on."""
MAX_GROWTH_MIB = 16.0
"""The most memory that the switched process may gain over all later switches together. One KV pool of it is larger."""
NUM_SWITCHES, NUM_SWITCHES_OF_OTHERS = 50, 6
SETTINGS = ("--dtype=float32", "--num-threads=1", "--max-rows=16", "--max-kv-tokens=16384", "--grace-period-s=30")


@dataclass(frozen=True, slots=True)
class Case:
    """A feature beside which roles are switched. `settings` are those of all services, `prefill_settings` those of the
    services that begin as prefill services.
    """

    name: str
    architecture: str = "llama"
    has_draft: bool = False
    settings: tuple[str, ...] = ()
    prefill_settings: tuple[str, ...] = ()


CASES = (
    Case("KV through shared memory"),
    Case("KV over gRPC", prefill_settings=("--kv-transport=grpc",)),
    Case("KV through NIXL", prefill_settings=("--kv-transport=nixl",)),
    Case("a draft head", has_draft=True),
    Case("windows", architecture="gemma3_text"),
    Case("two ranks", settings=("--tensor-parallel=2",)),
)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a process uses: memory that it shares with no other process, with that of its children; threads; open files,
    and those of them that lie in memory, as KV pools do; children.

    Shared memory is left out, because it grows while another service fills its pool. A pool that is not let go is seen
    as an open file.
    """

    own_mib: float
    num_threads: int
    num_files: int
    num_children: int
    num_memory_files: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        process = psutil.Process(pid)
        children = process.children(recursive=True)
        own = sum(each.memory_full_info().uss for each in (process, *children))
        links = [_target(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        return cls(
            own_mib=own / 2**20,
            num_threads=process.num_threads(),
            num_files=len(links),
            num_children=len(children),
            num_memory_files=sum(link.startswith("/memfd:") for link in links),
        )


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # it was closed meanwhile
        return ""


@dataclass(slots=True)
class Load:
    """Streams that run until `stop` is set, each one after another, and what came of them."""

    stop: Event = field(default_factory=Event)
    num_served: int = 0
    errors: list[str] = field(default_factory=list)
    longest_s: float = 0.0

    def wait_for_more(self, num: int) -> None:
        wanted = self.num_served + num
        wait_until(lambda: self.num_served >= wanted, about=lambda: self.errors[-1:])


async def _stream(client: AsyncClient, numbers: Iterator[int], expected: Sequence[Completion], load: Load) -> None:
    while not load.stop.is_set():
        number, begin_s = next(numbers), time.monotonic()
        try:
            completion = await client.complete(**WORKLOAD.options(number))
            assert_same(completion, expected[number % WORKLOAD.num_kinds])
        except (BatonError, AssertionError) as error:
            load.errors.append(f"request {number}: {type(error).__name__}: {error}")
        else:
            load.num_served += 1
        load.longest_s = max(load.longest_s, time.monotonic() - begin_s)


@contextmanager
def streams(addresses: Sequence[str], expected: Sequence[Completion], num_streams: int) -> Iterator[Load]:
    """Runs `num_streams` streams at a time while the block runs, from a client that resumes."""
    load, numbers = Load(), itertools.count()

    async def run() -> None:
        async with AsyncClient(",".join(addresses), resume=True) as client, asyncio.TaskGroup() as group:
            for _ in range(num_streams):
                group.create_task(_stream(client, numbers, expected, load))

    thread = Thread(target=lambda: asyncio.run(run()), name="streams")
    thread.start()
    try:
        yield load
    finally:
        load.stop.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class Services:
    """Three services. `switched` begins as a prefill service."""

    prefill: ServiceProcess
    decode: ServiceProcess
    switched: ServiceProcess

    @property
    def decode_addresses(self) -> tuple[str, str]:
        return self.decode.address, self.switched.address


@contextmanager
def services(case: Case, model: Path, directory: Path) -> Iterator[Services]:
    settings = [*SETTINGS, *case.settings]
    if case.has_draft:
        settings.append(f"--draft={save_eagle3_head(directory / 'head', target_dir=model)}")
    prefill, decode, switched = (f"127.0.0.1:{port}" for port in free_ports(3))
    other = directory / "as-decode.yaml"
    other.write_text(f"prefill: [{prefill}, {switched}]\nlocal_prefill_tokens: 0\n")

    def service(name: str, role: Role, address: str, *more: str) -> ServiceProcess:
        arguments = ("-m", f"{role}_service", f"--model={model}", f"--listen={address}", *settings, *more)
        return ServiceProcess(
            name=name, role=role.value, address=address, arguments=arguments, log_file=directory / f"{name}.log"
        )

    three = Services(
        service("prefill", Role.PREFILL, prefill, *case.prefill_settings),
        service("decode", Role.DECODE, decode, f"--prefill={prefill},{switched}", "--local-prefill-tokens=0"),
        service("switched", Role.PREFILL, switched, f"--other-role={other}", *case.prefill_settings),
    )
    every = (three.prefill, three.switched, three.decode)
    try:
        for each in every:
            each.start()
        for each in every:
            with Client(each.address) as client:
                wait_until(_serves(client, READY_SERVICE[each.role], each), about=each.log_tail)
        yield three
    finally:
        for each in every:
            each.terminate()
        for each in every:
            if not each.wait(BOUND_S):
                each.kill()


def _serves(client: Client, service: str, process: ServiceProcess) -> Callable[[], bool]:
    def serves() -> bool:
        process.check()
        try:
            return client.health(service) is HealthStatus.SERVING
        except BatonError:
            return False

    return serves


@dataclass(frozen=True, slots=True)
class Switch:
    """One switch: the role after it, how long it took, and what the process used after it."""

    role: Role
    seconds: float
    footprint: Footprint


def switch(case: Case, num_switches: int, directory: Path) -> tuple[list[Switch], Load]:
    done: list[Switch] = []
    model = save_tiny_model(directory, case.architecture)
    with services(case, model, directory) as three:
        with Client(three.decode.address) as client:
            expected = WORKLOAD.undisturbed(client)
        with (
            streams(three.decode_addresses, expected, NUM_STREAMS) as load,
            RoleClient(three.switched.address) as roles,
        ):
            for number in range(num_switches):
                change = roles.change(Role.PREFILL if number % 2 else Role.DECODE)
                load.wait_for_more(NUM_STREAMS)
                done.append(Switch(change.after.role, change.seconds, Footprint.of(three.switched.pid)))
                print(f"{number + 1}: {done[-1]}", flush=True)
    return done, load


def problems_of(done: Sequence[Switch], load: Load) -> list[str]:
    """Returns what went wrong: requests that were lost, and what the process has more of at the end than early on.

    The ends of switches to the same role are compared, because the roles differ in what they use.
    """
    problems = load.errors[:3]
    for role in Role:
        later = [each.footprint for each in done[SETTLING_SWITCHES:] if each.role is role]
        if len(later) < 2:
            continue
        third = max(1, len(later) // 3)
        first, last = later[:third], later[-third:]
        grown = statistics.median(each.own_mib for each in last) - statistics.median(each.own_mib for each in first)
        if grown > MAX_GROWTH_MIB:
            problems.append(f"as {role}: the memory grew by {grown:.0f} MiB")
        for name in ("num_threads", "num_files", "num_children", "num_memory_files"):
            more = statistics.median(getattr(each, name) for each in last) - statistics.median(
                getattr(each, name) for each in first
            )
            if more > 0:
                problems.append(f"as {role}: {name} grew by {more:g}")
    return problems


def rows_of(done: Sequence[Switch]) -> Iterator[str]:
    numbers = sorted({*range(SETTLING_SWITCHES, len(done) + 1, 10), *range(SETTLING_SWITCHES + 1, len(done) + 1, 10)})
    for number in (1, 2, *numbers):
        each = done[number - 1]
        used = each.footprint
        yield (
            f"| {number} | {each.role} | {each.seconds:.2f} | {used.own_mib:.0f} | {used.num_threads} | "
            f"{used.num_files} | {used.num_memory_files} | {used.num_children} |"
        )


def summary_of(case: Case, done: Sequence[Switch], load: Load) -> str:
    seconds = sorted(each.seconds for each in done)
    return (
        f"| {case.name} | {len(done)} | {statistics.median(seconds):.2f} | {seconds[-1]:.2f} | {load.num_served} | "
        f"{len(load.errors)} | {load.longest_s:.1f} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--switches", type=int, default=NUM_SWITCHES, help="of the first case")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    summaries: list[str] = []
    rows: list[str] = []
    problems: list[str] = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            is_first = case is CASES[0]
            done, load = switch(case, args.switches if is_first else NUM_SWITCHES_OF_OTHERS, Path(directory))
        summaries.append(summary_of(case, done, load))
        problems += [f"{case.name}: {problem}" for problem in problems_of(done, load)]
        if is_first:
            rows += rows_of(done)
    run = BenchmarkRun.of("role_switches")
    table = "\n".join(
        [
            *run.heading(
                "Roles switched under load",
                f"a tiny model, {NUM_STREAMS} streams at a time with `resume=True` over two addresses. A request that "
                "is served has the tokens of the undisturbed run. A switch lasts until the service is ready; times are "
                "in seconds.",
            ),
            "",
            "| with | switches | median | longest | served | failed | longest request |",
            "|---|---|---|---|---|---|---|",
            *summaries,
            "",
            "What the switched process uses after a switch, in the first of these:",
            "",
            "| switch | to | seconds | memory, MiB | threads | open files | of them in memory | children |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
        ]
    )
    print(table)
    if not args.no_save:
        run.save("role-switches", table)
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
