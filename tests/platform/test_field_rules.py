"""Tests that the tests which docs/field_rules.md names exist."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from scripts.field_rules import PAGE, FieldRule, rules_in

ROOT = Path(__file__).parents[2]
RULES = rules_in(PAGE.read_text())


@cache
def names_in(path: Path) -> frozenset[str]:
    """Returns the functions, classes and assigned names at the top level of a file."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def missing(rule: FieldRule, root: Path = ROOT) -> list[str]:
    """Returns the tests that a rule names but that do not exist. Each is given by its file, its function, or the check
    in brackets.
    """
    absent = []
    for test in rule.tests:
        file, _, rest = test.partition("::")
        name, _, case = rest.partition("[")
        wanted = {name, case.rstrip("]").partition("-")[0] or name}
        if not (root / file).is_file() or not wanted <= names_in(root / file):
            absent.append(test)
    return absent


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.number)
def test_its_tests_are_there(rule: FieldRule) -> None:
    assert rule.tests, "a rule without a test"
    assert missing(rule) == []


def test_every_rule_of_each_section_is_there() -> None:
    numbers = {rule.number.rstrip("abcdef") for rule in RULES}
    counts = {"1": 13, "2": 7, "4": 6}
    wanted = {f"{section}.{number}" for section, count in counts.items() for number in range(1, count + 1)}
    assert numbers == wanted
    assert len({rule.number for rule in RULES}) == len(RULES)
    assert len(RULES) == sum(line.startswith("| ") for line in PAGE.read_text().splitlines()) - len(counts)


@pytest.mark.parametrize(
    "test",
    [
        "tests/platform/no_such_file.py::test_x",
        "tests/platform/test_field_rules.py::test_that_nobody_wrote",
        "tests/engine/test_retraction.py::test_holds[check_that_nobody_wrote]",
    ],
)
def test_a_test_that_is_not_there_is_noticed(test: str) -> None:
    assert missing(FieldRule("9.9", "", (test,))) == [test]
