"""Writes questions about code, for `baton self-chat --questions`, from the Python source that is installed here.

    python -m training.questions OUT.jsonl [--seed N] [PACKAGE ...]

Each question is about a public function of the standard library, or of a named package, that has a docstring. Four in
five show the signature and docstring to be completed; one in five asks for the function in words. Source files are
parsed, never imported.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import random
import sysconfig
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError

_MIN_CHARS, _MAX_CHARS = 30, 400
_IN_WORDS_EVERY = 5
_REQUESTS = (
    "",
    "Complete this function.",
    "Finish this Python function.",
    "Implement the function below.",
    "Fill in the body of this function.",
    "Please write the rest of this function.",
)
_IN_WORDS = (
    "Write a Python function named `{name}` that does this: {summary}",
    "Please write a function `{name}` in Python. What it does: {summary}",
    "How would you write a Python function called `{name}`? It should do the following. {summary}",
)
_TESTS = frozenset({"test", "tests", "idle_test", "conftest"})
_INSTALLED = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, slots=True)
class Function:
    """A function. `head` is its source without decorators, up to the end of the docstring."""

    name: str
    head: str
    docstring: str


def python_files(packages: Sequence[str]) -> list[Path]:
    """Returns the source files of the standard library and of `packages`, without tests.

    Raises ConfigError for a missing package.
    """
    roots = [Path(sysconfig.get_path("stdlib"))]
    roots += [root for package in packages for root in _package_roots(package)]
    return [path for root in roots for path in _files_below(root)]


def public_functions(path: Path) -> Iterator[Function]:
    """Yields a module's public functions that have a docstring of suitable length; methods do not count.

    Yields nothing if the file cannot be parsed.
    """
    try:
        with tokenize.open(path) as file:
            source = file.read()
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    lines = source.split("\n")
    for node in _definitions(tree):
        docstring = ast.get_docstring(node) or ""
        if not node.name.startswith("_") and _MIN_CHARS <= len(docstring) <= _MAX_CHARS:
            yield Function(node.name, _head(node, lines), docstring)


def questions(functions: Iterable[Function], *, seed: int) -> list[str]:
    """Returns one question for each different docstring. `seed` decides their order and wording."""
    chosen = list({function.docstring: function for function in functions}.values())
    drawn = random.Random(seed)
    drawn.shuffle(chosen)
    return [_question(function, place % _IN_WORDS_EVERY == 0, drawn) for place, function in enumerate(chosen)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m training.questions", description="Write questions about code.")
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help="installed, read beside the standard library")
    parser.add_argument("--seed", type=int, default=0, help="of order and wording")
    given = parser.parse_intermixed_args(arguments)
    try:
        functions = (function for path in python_files(given.packages) for function in public_functions(path))
        asked = questions(functions, seed=given.seed)
        given.out.write_text("".join(json.dumps({"question": question}) + "\n" for question in asked))
    except (ConfigError, OSError) as error:
        parser.error(str(error))
    print(f"{given.out}: {len(asked)} questions")


def _package_roots(package: str) -> list[Path]:
    # Dotted names are refused, because finding a.b would import a.
    try:
        spec = importlib.util.find_spec(package) if package.isidentifier() else None
    except ValueError:  # raised for a module without a spec
        spec = None
    places = [] if spec is None else [*(spec.submodule_search_locations or [spec.origin or ""])]
    roots = [Path(place) for place in places if place and Path(place).exists()]
    if not roots:
        raise ConfigError(f"PACKAGE: no package {package} to read here")
    return roots


def _files_below(root: Path) -> list[Path]:
    found = sorted(root.rglob("*.py")) if root.is_dir() else [root]
    return [path for path in found if not any(map(_is_passed_over, path.relative_to(root).parts))]


def _is_passed_over(part: str) -> bool:
    stem = part.removesuffix(".py")
    return stem in _TESTS or stem in _INSTALLED or stem.startswith("test_") or stem.endswith("_test")


def _definitions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields the functions that a module defines, also under an `if` or `try`, but not in classes or functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.stmt | ast.ExceptHandler) and not isinstance(child, ast.ClassDef):
            yield from _definitions(child)


def _head(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]) -> str:
    first, docstring = node.lineno - 1, node.body[0]
    assert docstring.end_lineno is not None
    *before, last = lines[first : docstring.end_lineno]
    kept = [*before, last.encode()[: docstring.end_col_offset].decode()]
    indent = " " * node.col_offset
    return "\n".join(line.removeprefix(indent) for line in kept)


def _question(function: Function, in_words: bool, drawn: random.Random) -> str:
    if in_words:
        summary = function.docstring.splitlines()[0]
        return drawn.choice(_IN_WORDS).format(name=function.name, summary=summary)
    return f"{drawn.choice(_REQUESTS)}\n\n{function.head}".lstrip("\n")


if __name__ == "__main__":
    main()
