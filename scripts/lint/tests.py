"""Tests replace named seams only, and benchmarks/tests.md says why each dear test file is in the gate."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from scripts.lint.problem import ROOT, Problem, line_of, set_apart
from tests.support.costs import MAX_GATE_SECONDS, TABLE, read_table

TESTS = ROOT / "tests"
MUTANTS = TESTS / "engine" / "mutants"
"""The modules that break the engine on purpose, wherever it can break."""

OURS = ("baton.", "baton_cpu.", "baton_ray.", "common.", "decode_service.", "prefill_service.", "gateway.", "training.")


def a_dear_file_has_its_reason() -> Iterator[Problem]:
    text = TABLE.read_text()
    for file, row in read_table(text).items():
        if row.gate.seconds > MAX_GATE_SECONDS and not row.reason:
            yield Problem(TABLE, line_of(text, file), f"{file} costs {row.gate.seconds:g} s in the gate: why?")


def every_file_has_its_cost() -> Iterator[Problem]:
    """The parts and the limit of ten seconds go by the table."""
    files = {path.relative_to(ROOT).as_posix() for path in TESTS.rglob("test_*.py")}
    with_costs = {file for file in files if not file.startswith("tests/gpu/")}
    yield from set_apart(TABLE, "file", set(read_table(TABLE.read_text())), with_costs)


def no_private_name_is_replaced() -> Iterator[Problem]:
    """Tests replace only public names with `setattr` and `mock.patch.object`. Whoever changes a public name looks for
    those who use it.
    """
    for path in sorted(TESTS.rglob("*.py")):
        if path.is_relative_to(MUTANTS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(attr="setattr"), args=[ast.Constant(value=str(target)), *_]):
                    name = target.rpartition(".")[2] if target.startswith(OURS) else ""
                case ast.Call(
                    func=ast.Attribute(attr="setattr" | "object"), args=[_, ast.Constant(value=str(name)), *_]
                ):
                    pass
                case _:
                    continue
            if name.startswith("_") and not name.startswith("__"):
                yield Problem(path, node.lineno, f"{name} is private")
