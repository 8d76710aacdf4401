"""docs/field_rules.md has every rule, and the tests that it names exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from scripts.field_rules import PAGE, rules_in
from scripts.lint.problem import ROOT, Problem, line_of

NUM_RULES = {"1": 13, "2": 7, "4": 6}
"""The number of rules in each section. A letter after a rule's number marks a part of it."""


def every_rule_is_there() -> Iterator[Problem]:
    page = PAGE.read_text()
    numbers = [rule.number for rule in rules_in(page)]
    wanted = {f"{section}.{number}" for section, count in NUM_RULES.items() for number in range(1, count + 1)}
    for number in sorted(wanted ^ {number.rstrip("abcdef") for number in numbers}):
        yield Problem(PAGE, line_of(page, f"| {number}"), f"rule {number} is missing, or is one too many")
    for number in sorted({number for number in numbers if numbers.count(number) > 1}):
        yield Problem(PAGE, line_of(page, f"| {number} "), f"rule {number} is there twice")
    num_rows = sum(line.startswith("| ") for line in page.splitlines()) - len(NUM_RULES)
    if len(numbers) != num_rows:
        yield Problem(PAGE, 0, f"{num_rows - len(numbers)} rows are not read as rules")


def its_tests_exist() -> Iterator[Problem]:
    page = PAGE.read_text()
    for rule in rules_in(page):
        line = line_of(page, f"| {rule.number} ")
        if not rule.tests:
            yield Problem(PAGE, line, f"rule {rule.number} has no test")
        for test in rule.tests:
            if not exists(test):
                yield Problem(PAGE, line, f"rule {rule.number} names {test}, which does not exist")


def exists(test: str) -> bool:
    """Returns whether a test's file has its function, and the check in brackets if there is one."""
    file, _, rest = test.partition("::")
    name, _, case = rest.partition("[")
    wanted = {name, case.rstrip("]").partition("-")[0] or name}
    return (ROOT / file).is_file() and wanted <= _names_in(ROOT / file)


@cache
def _names_in(path: Path) -> frozenset[str]:
    """Returns the functions, classes and assigned or imported names at the top level of a file."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign():
                names |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            case ast.ImportFrom():
                names |= {alias.asname or alias.name for alias in node.names}
    return frozenset(names)
