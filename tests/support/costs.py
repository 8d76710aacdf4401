"""What the test files cost: measured in every run, printed at its end, and kept in benchmarks/tests.md.

The kept table decides which files start first, and which thorough tests belong to a part (`--part 3/8`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "tests.md"

MAX_GATE_SECONDS = 10.0
"""A file above this in `make test` has its reason in the table."""

ONE_UNIT = "tests/interleavings"
"""A folder whose files stay in one part. It costs more than any other unit, so it is the first part."""

_UNKNOWN_SECONDS = 1.0
_NUM_SLOWEST = 10
_ROW = re.compile(r"^\| `(?P<file>tests/[^`]+\.py)` \|(?P<cells>.*)\|$", re.MULTILINE)
_COLUMNS = "gate: tests | gate: s | thorough: tests | thorough: s |"
_FILES_HEADER = f"| file | {_COLUMNS} why it is in the gate |\n|---|--:|--:|--:|--:|---|\n"
_FOLDERS_HEADER = f"| folder | {_COLUMNS}\n|---|--:|--:|--:|--:|\n"


@dataclass
class Cost:
    """Number of tests, and seconds of processor time of the test process and all its descendants."""

    tests: int = 0
    seconds: float = 0.0


@dataclass
class FileCosts:
    """The costs of a file's tests: of those that the gate runs, and of those that only `make test-all` runs.

    `reason` says why a dear file is in the gate.
    """

    gate: Cost = field(default_factory=Cost)
    thorough: Cost = field(default_factory=Cost)
    reason: str = ""


def read_table(text: str) -> dict[str, FileCosts]:
    """Returns the costs by file. Raises ValueError, which names the file, for a row with another number of cells."""
    costs: dict[str, FileCosts] = {}
    for row in _ROW.finditer(text):
        cells = [cell.strip() for cell in row["cells"].split("|")]
        if len(cells) != 5:
            raise ValueError(f"{row['file']}: {len(cells) + 1} cells, not 6")
        gate, thorough = (Cost(int(cells[at]), float(cells[at + 1])) for at in (0, 2))
        costs[row["file"]] = FileCosts(gate, thorough, cells[4])
    return costs


def kept_costs() -> dict[str, FileCosts]:
    """Returns the costs by file of the table in the repository, or none where there is no table."""
    return read_table(TABLE.read_text()) if TABLE.exists() else {}


def part_of_files(costs: Mapping[str, float], num_parts: int) -> dict[str, int]:
    """Splits files among parts of about equal cost: each unit, the dearest first, goes to the cheapest part.

    Returns the part of each file, counted from 1. The same files and costs always give the same parts.
    """
    units: dict[str, list[str]] = defaultdict(list)
    for file in sorted(costs):
        units[ONE_UNIT if file.startswith(f"{ONE_UNIT}/") else file].append(file)
    cost_of = {unit: sum(costs[file] for file in files) for unit, files in units.items()}
    load = dict.fromkeys(range(1, num_parts + 1), 0.0)
    part_of: dict[str, int] = {}
    for unit in sorted(units, key=lambda unit: (unit != ONE_UNIT, -cost_of[unit], unit)):
        part = min(load, key=lambda part: (load[part], part))
        load[part] += cost_of[unit]
        part_of.update(dict.fromkeys(units[unit], part))
    return part_of


def command_for(file: str, *, thorough: bool, num_parts: int = 8) -> str:
    """Returns the command that runs the gate's tests of a file or its thorough ones: `make test`, or that of a part."""
    if not thorough:
        return "make test"
    costs = {name: row.thorough.seconds for name, row in kept_costs().items() if row.thorough.tests or name == file}
    return f"make test-all PART={part_of_files(costs, num_parts)[file]}/{num_parts}"


def _file_of(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT).as_posix()


def _is_thorough(item: pytest.Item) -> bool:
    return item.get_closest_marker("thorough") is not None


def _parts(text: str) -> tuple[set[int], int]:
    if match := re.fullmatch(r"(\d+(?:,\d+)*)/(\d+)", text):
        parts, num_parts = {int(part) for part in match[1].split(",")}, int(match[2])
        if all(1 <= part <= num_parts for part in parts):
            return parts, num_parts
    raise pytest.UsageError(f"--part {text}: not K/N with K from 1 to N, such as 3/8 or 1,3/8")


def _seconds_of_tree() -> float:
    """Returns the processor seconds of this process, its descendants, and those that they have waited for."""
    seconds = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


class TestCosts:
    """A pytest plugin. In a process that runs tests it measures them; the one that reports adds the figures up."""

    __test__ = False

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._kept = kept_costs()
        self._of_files: dict[tuple[str, bool], Cost] = defaultdict(Cost)
        self._before: float | None = None
        self._seconds_outside = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keeps the tests of the parts, and puts the dearest files first: processes that each take whole files then
        finish at nearly the same time. The order of tests within a file stays.
        """
        if parts_of_n := config.getoption("part"):
            parts, num_parts = _parts(parts_of_n)
            files = {_file_of(item) for item in items}
            part_of = part_of_files({file: self._seconds(file, thorough=True) for file in files}, num_parts)
            left = [item for item in items if part_of[_file_of(item)] not in parts]
            items[:] = [item for item in items if part_of[_file_of(item)] in parts]
            config.hook.pytest_deselected(items=left)
        kinds = {(_file_of(item), _is_thorough(item)) for item in items}
        seconds: dict[str, float] = defaultdict(float)
        for file, thorough in kinds:
            seconds[file] += self._seconds(file, thorough=thorough)
        items.sort(key=lambda item: (-seconds[_file_of(item)], _file_of(item)))

    def _seconds(self, file: str, *, thorough: bool) -> float:
        if (kept := self._kept.get(file)) is None:
            return _UNKNOWN_SECONDS
        return kept.thorough.seconds if thorough else kept.gate.seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, bool | None, bool | None]:
        if self._before is None:
            self._before = self._seconds_outside = _seconds_of_tree()
        result = yield
        kind = _file_of(item), _is_thorough(item)
        self._of_files[kind].tests += 1
        if nextitem is None or kind != (_file_of(nextitem), _is_thorough(nextitem)):
            seconds = _seconds_of_tree()
            self._of_files[kind].seconds += seconds - self._before
            self._before = seconds
        return result

    def pytest_sessionfinish(self) -> None:
        if (output := getattr(self._config, "workeroutput", None)) is not None:
            output["costs"] = [(*kind, cost.tests, cost.seconds) for kind, cost in self._of_files.items()]
            output["seconds_outside"] = self._seconds_outside

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})
        for file, thorough, tests, seconds in output.get("costs", ()):
            self._of_files[file, thorough].tests += tests
            self._of_files[file, thorough].seconds += seconds
        self._seconds_outside += output.get("seconds_outside", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, exitstatus: int) -> None:
        if not self._of_files:
            return
        folders: dict[str, Cost] = defaultdict(Cost)
        files: dict[str, float] = defaultdict(float)
        for (file, _), cost in self._of_files.items():
            folder = folders[file.split("/")[1]]
            folder.tests += cost.tests
            folder.seconds += cost.seconds
            files[file] += cost.seconds
        terminalreporter.section("processor seconds by folder")
        for name, cost in sorted(folders.items(), key=lambda entry: -entry[1].seconds):
            terminalreporter.write_line(f"{cost.seconds:8.1f}  {cost.tests:6} tests  {name}")
        total = sum(cost.seconds for cost in folders.values())
        num_tests = sum(cost.tests for cost in folders.values())
        terminalreporter.write_line(f"{self._seconds_outside:8.1f}                imports and collection")
        terminalreporter.write_line(f"{total + self._seconds_outside:8.1f}  {num_tests:6} tests  in all")
        terminalreporter.section(f"the {_NUM_SLOWEST} files with most processor seconds")
        for file, seconds in sorted(files.items(), key=lambda entry: -entry[1])[:_NUM_SLOWEST]:
            terminalreporter.write_line(f"{seconds:8.1f}  {file}")
        for (file, thorough), cost in self._of_files.items():
            kept = self._kept.get(file)
            if not thorough and cost.seconds > MAX_GATE_SECONDS and not (kept and kept.reason):
                terminalreporter.write_line(f"{file}: above {MAX_GATE_SECONDS:g} s in the gate, without a reason")
        if self._config.getoption("write_costs") and exitstatus == pytest.ExitCode.OK:
            self._write()

    def _write(self) -> None:
        """Replaces the figures of what ran in the kept table, and those of the whole gate if it ran. Rows of files that
        are gone leave it.
        """
        costs = {file: kept for file, kept in self._kept.items() if (ROOT / file).exists()}
        is_narrowed = any(map(self._config.getoption, ("part", "keyword", "lf", "ignore", "deselect")))
        if self._config.args_source is not pytest.Config.ArgsSource.ARGS and not is_narrowed:
            kinds = {thorough for _, thorough in self._of_files}
            for row in costs.values():
                row.gate = Cost() if False in kinds else row.gate
                row.thorough = Cost() if True in kinds else row.thorough
        for (file, thorough), cost in self._of_files.items():
            row = costs.setdefault(file, FileCosts())
            if thorough:
                row.thorough = cost
            else:
                row.gate = cost
        from benchmarks.machine import describe_machine  # imports torch, which the lint of the table does without

        TABLE.write_text(page(costs, f"{date.today():%Y-%m-%d}, {describe_machine()}"))


def page(costs: Mapping[str, FileCosts], measured: str) -> str:
    """Returns the page with the table of costs. `measured` says when and on what machine."""
    folders: dict[str, FileCosts] = defaultdict(FileCosts)
    for file, row in costs.items():
        folder = folders[file.split("/")[1]]
        for total, cost in ((folder.gate, row.gate), (folder.thorough, row.thorough)):
            total.tests += cost.tests
            total.seconds += cost.seconds

    def cells(row: FileCosts) -> str:
        return f"{row.gate.tests} | {row.gate.seconds:.1f} | {row.thorough.tests} | {row.thorough.seconds:.1f} |"

    def dearest(rows: Mapping[str, FileCosts]) -> list[tuple[str, FileCosts]]:
        return sorted(rows.items(), key=lambda entry: (-entry[1].gate.seconds, -entry[1].thorough.seconds, entry[0]))

    return (
        "# What the tests cost\n\n"
        "Processor seconds of each test file and of the processes that it starts. `make test` runs the gate, and\n"
        "`make test-all` the thorough tests as well. `make test-all PYTEST_ARGS=--write-costs` writes this page, and\n"
        "`make test` with that argument its own figures. A file above ten seconds in the gate has its reason in the\n"
        "last column, which is written by hand.\n\n"
        f"{measured}\n\n"
        f"{_FOLDERS_HEADER}"
        + "".join(f"| {name} | {cells(row)}\n" for name, row in dearest(folders))
        + f"\n{_FILES_HEADER}"
        + "".join(f"| `{file}` | {cells(row)} {row.reason} |\n" for file, row in dearest(costs))
    )
