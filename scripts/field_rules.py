"""Runs the tests that docs/field_rules.md names, and prints each of its rules with their result.

python -m scripts.field_rules            run the tests; exit 1 if one failed or did not run
python -m scripts.field_rules --list     print the tests and what runs them, and run none
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.costs import command_for

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "field_rules.md"


@dataclass(frozen=True, slots=True)
class FieldRule:
    """A rule in docs/field_rules.md with the tests that check it.

    `tests` are pytest ids; an id without brackets stands for all parameter sets of the test.
    """

    number: str
    text: str
    tests: tuple[str, ...]


def rules_in(page: str) -> list[FieldRule]:
    """Returns the rules in the page's tables, in order."""
    return [
        FieldRule(number, text.strip(), tuple(re.findall(r"`(tests/[^`]+)`", tests)))
        for number, text, tests in re.findall(
            r"^\| (\d+\.\d+[a-z]?) ([^|]+)\|[^|]*\|([^|]*)\|$", page, flags=re.MULTILINE
        )
    ]


class _Results:
    """A pytest plugin that records which test cases passed, failed (in any phase) or were skipped."""

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: set[str] = set()
        self.skipped: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.skipped:
            self.skipped.add(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def of(self, test: str) -> str:
        if num_failed := len(_cases_of(test, self.failed)):
            return f"FAILED ({num_failed})"
        num_passed, num_skipped = len(_cases_of(test, self.passed)), len(_cases_of(test, self.skipped))
        if not num_passed:
            return f"SKIPPED ({num_skipped})" if num_skipped else "NOT RUN"
        return f"passed ({num_passed})"


class _Marks:
    """A pytest plugin that records which test cases there are, and which of them are thorough."""

    def __init__(self) -> None:
        self.is_thorough: dict[str, bool] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.is_thorough[item.nodeid] = item.get_closest_marker("thorough") is not None

    def commands_of(self, test: str) -> str:
        kinds = {self.is_thorough[case] for case in _cases_of(test, self.is_thorough)}
        return ", ".join(command_for(test.partition("::")[0], thorough=kind) for kind in sorted(kinds)) or "NOT THERE"


def _cases_of(test: str, cases: Iterable[str]) -> list[str]:
    return [case for case in cases if case == test or case.startswith((f"{test}[", f"{test}::"))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tests and prints the table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the tests and run none")
    options = parser.parse_args(arguments)
    rules = rules_in(PAGE.read_text())
    tests = [str(ROOT / test) for test in dict.fromkeys(test for rule in rules for test in rule.tests)]
    pytest_args = ["-q", "-m", "not gpu", f"--rootdir={ROOT}", *tests]
    if options.list:
        marks = _Marks()
        with redirect_stdout(io.StringIO()):
            status = int(pytest.main([*pytest_args, "--collect-only"], plugins=[marks]))
        print("| rule | test | run by |\n|---|---|---|")
        for rule in rules:
            for test in rule.tests:
                print(f"| {rule.number} | `{test}` | {marks.commands_of(test)} |")
        return status
    results = _Results()
    status = int(pytest.main(pytest_args, plugins=[results]))
    print("| rule | test | result |\n|---|---|---|")
    outcomes = [(rule, test, results.of(test)) for rule in rules for test in rule.tests]
    for rule, test, outcome in outcomes:
        print(f"| {rule.number} {rule.text} | `{test}` | {outcome} |")
    num_bad = sum(not outcome.startswith("passed") for _, _, outcome in outcomes)
    print(
        f"\n{len(rules)} rules, {len(results.passed)} cases passed; of {len(outcomes)} entries {num_bad} did not pass"
    )
    return 1 if status or num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
