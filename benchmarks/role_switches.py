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

import psutil

from baton.client import AsyncClient, Client
from baton.errors import BatonError
from baton.events import Completion
from baton.free_ports import HeldPorts
from baton.roles import RoleClient
from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE, ServiceProcess
from benchmarks.benchmark_run import BenchmarkRun
from common.role import Role
from tests.e2e.load import Workload, assert_same
from tests.support.draft_heads import save_eagle3_head
from tests.support.models import save_tiny_model
from tests.support.running_pair import BOUND_S, wait_until

WORKLOAD = Workload(prompt_tokens=60, new_tokens=40)
NUM_STREAMS = 6
MAX_SETTLING_SWITCHES = 10
COMPILER = "baton_cpu.program.compile"
MAX_GROWTH_MIB = 16.0
"""The most memory that a process may gain over all later switches together. One KV pool of it is larger."""
MAX_MORE = 2
"""By how much a count may grow: a process maps the pools of two others, as calls to them come and go."""
NUM_SWITCHES, NUM_SWITCHES_OF_OTHERS = 50, 12
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
    """One look at what a process uses: memory that it and its children share with no other process; threads; open files
    but no connections, and those of them that lie in memory, as KV pools do; children.

    Shared memory is left out, because it grows while another service fills its pool. A pool that is not let go is seen
    as an open file. Children that compile kernels are left out too: they go on from role to role, and grow meanwhile.
    """

    own_mib: float
    num_threads: int
    num_files: int
    num_children: int
    num_memory_files: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        process = psutil.Process(pid)
        children = [each for each in process.children(recursive=True) if not _compiles(each)]
        own = sum(each.memory_full_info().uss for each in (process, *children))
        links = [_target(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        return cls(
            own_mib=own / 2**20,
            num_threads=process.num_threads(),
            num_files=sum(not link.startswith("socket:") for link in links),
            num_children=len(children),
            num_memory_files=sum(link.startswith("/memfd:") for link in links),
        )


def _compiles(child: psutil.Process) -> bool:
    """Returns whether a child compiles kernels, or has ended meanwhile."""
    try:
        return COMPILER in child.cmdline()
    except psutil.NoSuchProcess:
        return True


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
    held = HeldPorts(3)
    prefill, decode, switched = (f"127.0.0.1:{port}" for port in held.numbers)
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
    """One switch: the role after it, how long it took, and what two processes used after it: the switched one, and the
    decode service that keeps its role.
    """

    role: Role
    seconds: float
    footprint: Footprint
    of_decode: Footprint


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
                footprints = Footprint.of(three.switched.pid), Footprint.of(three.decode.pid)
                done.append(Switch(change.after.role, change.seconds, *footprints))
                print(f"{number + 1}: {done[-1]}", flush=True)
    return done, load


def num_settling(num_switches: int) -> int:
    """Returns how many switches come first: they load code and fill caches, and growth is counted after them."""
    return min(MAX_SETTLING_SWITCHES, num_switches // 3)


@dataclass(frozen=True, slots=True)
class Growth:
    """Says what a process has more of at the end than after the settling switches: memory, and counts by their name."""

    own_mib: float
    counts: dict[str, float]

    @classmethod
    def of(cls, footprints: Sequence[Footprint]) -> Growth:
        """Compares the medians of the first and of the last third of `footprints`, of which there are at least two.

        NIXL's child comes and goes with the replica that it reads from, and has memory and files of its own. So these
        are compared among the footprints that have as many children as most have.
        """
        usual = statistics.mode(each.num_children for each in footprints)
        alike = [each for each in footprints if each.num_children == usual]
        counts = ("num_threads", "num_files", "num_memory_files")
        return cls(
            _more("own_mib", alike),
            {"num_children": _more("num_children", footprints), **{name: _more(name, alike) for name in counts}},
        )

    @property
    def problems(self) -> list[str]:
        problems = [f"{name} grew by {more:g}" for name, more in self.counts.items() if more > MAX_MORE]
        return [f"the memory grew by {self.own_mib:.0f} MiB", *problems] if self.own_mib > MAX_GROWTH_MIB else problems


def _more(name: str, footprints: Sequence[Footprint]) -> float:
    assert len(footprints) >= 2, "nothing to compare"
    third = max(1, len(footprints) // 3)
    first, last = ([getattr(each, name) for each in part] for part in (footprints[:third], footprints[-third:]))
    return float(statistics.median(last) - statistics.median(first))


def growths_of(done: Sequence[Switch]) -> dict[str, Growth]:
    """Returns the growth of the switched process in each role, and that of the decode service.

    The ends of switches to the same role are compared, because the roles differ in what both use.
    """
    growths: dict[str, Growth] = {}
    for role in Role:
        later = [each for each in done[num_settling(len(done)) :] if each.role is role]
        growths[f"the switched process as {role}"] = Growth.of([each.footprint for each in later])
        growths[f"the decode service beside a {role} service"] = Growth.of([each.of_decode for each in later])
    return growths


def problems_of(done: Sequence[Switch], load: Load) -> list[str]:
    """Returns what went wrong: requests that were lost, and what processes have more of at the end than early on."""
    grown = [f"{process}: {problem}" for process, growth in growths_of(done).items() for problem in growth.problems]
    return [*load.errors[:3], *grown]


def rows_of(done: Sequence[Switch]) -> Iterator[str]:
    numbers = {*range(10, len(done) + 1, 10), *range(11, len(done) + 1, 10)} - {1, 2}
    for number in (1, 2, *sorted(numbers)):
        each = done[number - 1]
        used = each.footprint
        yield (
            f"| {number} | {each.role} | {each.seconds:.2f} | {used.own_mib:.0f} | {used.num_threads} | "
            f"{used.num_files} | {used.num_memory_files} | {used.num_children} |"
        )


def summary_of(case: Case, done: Sequence[Switch], load: Load) -> str:
    seconds, growths = sorted(each.seconds for each in done), growths_of(done)
    switched = max(growth.own_mib for process, growth in growths.items() if "switched" in process)
    decode = max(growth.own_mib for process, growth in growths.items() if "decode service" in process)
    count = max(more for growth in growths.values() for more in growth.counts.values())
    return (
        f"| {case.name} | {len(done)} | {statistics.median(seconds):.2f} | {seconds[-1]:.2f} | {load.num_served} | "
        f"{len(load.errors)} | {load.longest_s:.1f} | {switched:+.1f} | {decode:+.1f} | {count:+g} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--switches", type=int, default=NUM_SWITCHES, help="of the first case")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    if args.switches < NUM_SWITCHES_OF_OTHERS:
        parser.error(f"--switches: {args.switches} is less than {NUM_SWITCHES_OF_OTHERS}, which leaves none to compare")
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
            "| with | switches | median | longest | served | failed | longest request | switched, MiB | decode, MiB "
            "| counts |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *summaries,
            "",
            "The last three columns are growths: of the memory of the switched process, of the memory of the decode "
            "service that keeps its role, and the largest of a count of threads, files or children of either. The "
            f"first third of the switches, at most {MAX_SETTLING_SWITCHES}, is left out. Of the rest the last third "
            "is compared with the first, for switches to the same role, and the larger growth of both roles is shown.",
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
