"""benchmarks/tests.md says why each test file that costs more than ten seconds is in the gate."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.lint.problem import Problem, line_of
from tests.support.costs import MAX_GATE_SECONDS, TABLE, read_table


def a_dear_file_has_its_reason() -> Iterator[Problem]:
    text = TABLE.read_text()
    for file, row in read_table(text).items():
        if row.gate.seconds > MAX_GATE_SECONDS and not row.reason:
            yield Problem(TABLE, line_of(text, file), f"{file} costs {row.gate.seconds:g} s in the gate: why?")
