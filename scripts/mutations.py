"""Changes one random place of the product at a time, and runs the tests that reach its line.

make test-all PYTEST_ARGS="--cov --cov-context=test --cov-report="     writes .coverage: which test reaches which line
python -m scripts.mutations --num 40 --seed 1                          tries as many changes, in a copy of HEAD

A change is killed when a test fails. The table says whether the gate kills it, or else a thorough test.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    *("common/kv", "common/sampling", "gateway"),
    *("decode_service/forward", "decode_service/schedule", "prefill_service/schedule"),
)
MAX_SECONDS = 1800.0
"""The tests of one change that take longer have hung, which kills it."""

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    kind: other
    for one, another in (
        *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)),
        *((ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.And, ast.Or)),
    )
    for kind, other in ((one, another), (another, one))
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change: `new` in place of what `file` has from `begin` to `end` (characters). `line` is counted from 1."""

    file: str
    line: int
    begin: int
    end: int
    old: str
    new: str

    def applied_to(self, source: str) -> str:
        return source[: self.begin] + self.new + source[self.end :]


def mutations_of(file: str, source: str) -> Iterator[Mutation]:
    """Yields every change that is tried: another operator, number, condition or result, or a statement left out."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = source.splitlines()

    def place(line: int, column_bytes: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column_bytes].decode())

    for node in _code(ast.parse(source)):
        if not isinstance(node, ast.expr | ast.stmt) or (new := _changed(node)) is None:
            continue
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
        yield Mutation(file, node.lineno, begin, end, source[begin:end], new)


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes below `node`, without those of formatted strings, whose places Python 3.11 does not know."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):
            yield child
            yield from _code(child)


def _changed(node: ast.AST) -> str | None:
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _SWAPPED:
            return f"({ast.unparse(ast.Compare(left, [_SWAPPED[type(operator)]()], [right]))})"  # type: ignore[list-item]
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _SWAPPED:
            return f"({ast.unparse(ast.BinOp(left, _SWAPPED[type(operator)](), right))})"  # type: ignore[arg-type]
        case ast.BoolOp(op=operator, values=values):
            return f"({ast.unparse(ast.BoolOp(_SWAPPED[type(operator)](), values))})"  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"({ast.unparse(operand)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"({ast.unparse(ast.IfExp(test, orelse, body))})"
        case ast.Constant(value=bool(value)):
            return repr(not value)
        case ast.Constant(value=int(value)):
            return repr(value + 1)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            return "return None"
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            return "pass"
    return None


def tests_by_line(data: CoverageData, file: str) -> dict[int, set[str]]:
    """Returns the ids of the tests that reach each line of a file."""
    return {
        line: {context.rpartition("|")[0] for context in contexts if context}
        for line, contexts in data.contexts_by_lineno(str(ROOT / file)).items()
    }


def drawn(*, num: int, seed: int) -> list[Mutation]:
    """Draws changes. The same product and seed give the same ones, whatever the tests are."""
    every: list[Mutation] = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            every += mutations_of(path.relative_to(ROOT).as_posix(), path.read_text())
    return random.Random(seed).sample(every, num)


def fails(copy: Path, tests: set[str], *arguments: str) -> bool:
    """Runs tests in a copy of the repository. Returns whether one fails or hangs; no test at all does not."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as named:
        named.write("\n".join(sorted(tests)))
        named.flush()
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "--dist", "loadfile", *arguments]
        with subprocess.Popen(
            [*command, f"@{named.name}"],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as running:
            try:
                status = running.wait(MAX_SECONDS)
            except subprocess.TimeoutExpired:
                return True
            finally:
                with suppress(ProcessLookupError):  # its processes too, which may hang
                    os.killpg(running.pid, signal.SIGKILL)
    return status not in (0, 5)


def killer(copy: Path, mutation: Mutation, tests: set[str]) -> str:
    """Tries a change. Returns "gate", "thorough", "no", or "not reached" if no test reaches its line. A test that fails
    without the change too kills nothing.
    """
    if not tests:
        return "not reached"
    path = copy / mutation.file
    source = path.read_text()
    for name, selection in (("gate", "not gpu and not thorough"), ("thorough", "thorough and not gpu")):
        path.write_text(mutation.applied_to(source))
        is_seen = fails(copy, tests, "-m", selection)
        path.write_text(source)
        if is_seen and not fails(copy, tests, "-m", selection, "--last-failed"):
            return name
    return "no"


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the changes and prints a row for each as soon as it is known. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--coverage", type=Path, default=ROOT / ".coverage", help="the file that a run with --cov wrote"
    )
    parser.add_argument("--num", type=int, default=40, help="how many changes")
    parser.add_argument("--seed", type=int, default=0, help="draws the changes")
    options = parser.parse_args(arguments)
    data = CoverageData(str(options.coverage))
    data.read()
    killed = {"gate": 0, "thorough": 0, "no": 0, "not reached": 0}
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "copy"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(copy), "HEAD"], cwd=ROOT, check=True)
        try:
            print("| place | change | tests | killed by |\n|---|---|--:|---|", flush=True)
            for mutation in drawn(num=options.num, seed=options.seed):
                tests = tests_by_line(data, mutation.file).get(mutation.line, set())
                by = killer(copy, mutation, tests)
                killed[by] += 1
                change = f"`{_short(mutation.old)}` → `{_short(mutation.new)}`"
                print(f"| {mutation.file}:{mutation.line} | {change} | {len(tests)} | {by} |", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(copy)], cwd=ROOT, check=True)
    print("\n" + ", ".join(f"{name}: {count}" for name, count in killed.items()))
    return 0


def _short(code: str) -> str:
    code = " ".join(code.split()).replace("|", "\\|")
    return code if len(code) <= 60 else f"{code[:57]}..."


if __name__ == "__main__":
    sys.exit(main())
