"""Tests of generated questions about code: the functions they ask about, and their wording."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from training.generate import read_questions
from training.questions import Function, main, public_functions, python_files, questions

_LONG_ENOUGH = "Does what a function of that name does."


def save_module(path: Path, *names: str) -> None:
    """Writes a module with functions of these names, each with its own docstring."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(f'def {name}():\n    """{_LONG_ENOUGH} {name}"""\n' for name in names))


@pytest.fixture
def stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake standard library of two files, beside other folders that an installation has."""
    root = tmp_path / "lib" / "python3"
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(root)}.__getitem__)
    save_module(root / "alpha.py", "one", "two")
    save_module(root / "sub" / "beta.py", "three")
    for tests in ("test/a.py", "sub/tests/a.py", "sub/idle_test/a.py", "test_a.py", "sub/a_test.py", "conftest.py"):
        save_module(root / tests, "a_test")
    save_module(root / "site-packages" / "planted" / "core.py", "four")
    save_module(root / "site-packages" / "planted" / "tests" / "test_core.py", "tested")
    save_module(root / "site-packages" / "alone.py", "five")
    save_module(root / "dist-packages" / "other.py", "six")
    monkeypatch.syspath_prepend(str(root / "site-packages"))
    return root


def found(source: str, tmp_path: Path) -> list[Function]:
    (tmp_path / "module.py").write_text(source)
    return list(public_functions(tmp_path / "module.py"))


def functions(number: int) -> list[Function]:
    return [Function(f"f{each}", f"def f{each}(): ...", f"The summary of {each}.\n\nMore.") for each in range(number)]


def test_files_are_of_the_standard_library_and_of_packages_named(stdlib: Path) -> None:
    assert [path.name for path in python_files([])] == ["alpha.py", "beta.py"]
    assert [path.name for path in python_files(["planted", "alone"])] == ["alpha.py", "beta.py", "core.py", "alone.py"]


def test_what_is_read_is_not_imported(stdlib: Path) -> None:
    (stdlib / "site-packages" / "planted" / "__init__.py").write_text("raise RuntimeError")
    (stdlib / "alpha.py").write_text(f"raise RuntimeError\ndef one():\n    '''{_LONG_ENOUGH}'''")
    files = python_files(["planted"])
    assert [function.name for path in files for function in public_functions(path)] == ["one", "three", "four"]
    assert "planted" not in sys.modules


def test_functions_are_public_and_described(tmp_path: Path) -> None:
    docstring = f'"""{_LONG_ENOUGH}"""'
    source = f"""
def plain(): {docstring}
async def waits():
    {docstring}
def _private():
    {docstring}
def bare():
    def inside():
        {docstring}
class Public:
    def method(self):
        {docstring}
try:
    pass
except ImportError:
    def fallback():
        {docstring}
"""
    assert [function.name for function in found(source, tmp_path)] == ["plain", "waits", "fallback"]


@pytest.mark.parametrize(("num_chars", "is_kept"), [(29, False), (30, True), (400, True), (401, False)])
def test_docstrings_are_neither_short_nor_long(num_chars: int, is_kept: bool, tmp_path: Path) -> None:
    """Lengths count without indentation."""
    text = f"a\n    {'b' * (num_chars - 2)}"
    assert bool(found(f'def f():\n    """{text}\n    """', tmp_path)) is is_kept


def test_the_head_is_the_source_to_the_end_of_the_docstring(tmp_path: Path) -> None:
    source = '''
if True:
    @decorated
    def über(
        mode=0o777,  # octal
    ) -> "int | None":
        r"""The ümlaut \\d is kept as it is.

        And so is this.
        """; return mode
'''
    (function,) = found(source, tmp_path)
    assert function.docstring == "The ümlaut \\d is kept as it is.\n\nAnd so is this."
    assert (
        function.head
        == '''
def über(
    mode=0o777,  # octal
) -> "int | None":
    r"""The ümlaut \\d is kept as it is.

    And so is this.
    """'''.lstrip()
    )


@pytest.mark.parametrize(
    "content", [b"def f(:", b"\xff", b"\n\n\n# \xff", b"\0", b"# coding: klingon", b"-" * 100_000 + b"1"]
)
def test_what_cannot_be_parsed_is_passed_over(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_bytes(content)
    assert list(public_functions(tmp_path / "module.py")) == []
    assert list(public_functions(tmp_path / "none.py")) == []


def test_warnings_of_what_is_read_are_not_ours(tmp_path: Path) -> None:
    assert found(f'PATTERN = "\\d"\ndef f():\n    """{_LONG_ENOUGH}"""', tmp_path)


def test_each_docstring_is_asked_about_once() -> None:
    same = [Function(name, f"def {name}(): ...", "The same for both of them.") for name in "ab"]
    assert len(questions([*same, *functions(4)], seed=0)) == 5


def test_the_order_depends_on_the_seed_only() -> None:
    assert questions(functions(30), seed=1) == questions(functions(30), seed=1)
    first, second = ([re.findall(r"\d+", each)[0] for each in questions(functions(30), seed=seed)] for seed in (1, 2))
    assert first != second and sorted(first) == sorted(second)


def test_four_in_five_are_to_be_completed_and_one_is_asked_for_in_words() -> None:
    asked = questions(functions(500), seed=0)
    completed = [question for question in asked if question.endswith("(): ...")]
    in_words = [question for question in asked if question not in completed]
    assert (len(completed), len(in_words)) == (400, 100)
    requests = {question.rpartition("def ")[0] for question in completed}
    assert {"", "Complete this function.\n\n"} < requests
    assert len(requests) > 4
    for question in in_words:
        number = question.split("`f")[1].split("`")[0]
        assert question.startswith(("Write a ", "Please write a ", "How would you write a "))
        assert question.endswith(f" The summary of {number}.")
    assert not any("Complete the code I provided" in question for question in asked)


def test_the_file_is_what_self_chat_reads(stdlib: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    main([str(out), "--seed", "3", "planted"])
    of_these = (function for path in python_files(["planted"]) for function in public_functions(path))
    assert list(read_questions(out).texts) == questions(of_these, seed=3)
    assert capsys.readouterr().out == f"{out}: 4 questions\n"


@pytest.mark.parametrize("package", ["not_installed", "planted.core", "sys"])
def test_a_package_that_cannot_be_read_is_named(
    package: str, stdlib: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path / "out.jsonl"), package])
    assert f"PACKAGE: no package {package} to read here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "Is a directory" in capsys.readouterr().err


@pytest.mark.thorough
def test_it_asks_about_the_python_that_runs_it(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "training.questions", str(out)]
    subprocess.run(command, check=True, timeout=100, cwd=Path(__file__).parents[2], capture_output=True)
    asked = [json.loads(line)["question"] for line in out.read_text().splitlines()]
    assert len(asked) > 500
    assert any("def commonpath(" in each or "`commonpath`" in each for each in asked)
