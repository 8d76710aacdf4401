"""Tests that `make gpu` and the GPU benchmark run on a machine on which nothing was installed for them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
INSTALLED = ("torch", "transformers", "pytest", "triton", "grpcio")
"""The libraries that are installed on a machine for GPU tests, apart from their requirements."""
REFUSE = """
import sys
from importlib.machinery import PathFinder

class FindRest(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in refused else super().find_spec(name, path, target)

refused = set(sys.argv.pop(1).split(","))
sys.meta_path[sys.meta_path.index(PathFinder)] = FindRest
"""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(names: tuple[str, ...]) -> set[str]:
    """Returns the distributions with these names, and everything they require."""
    found: set[str] = set()
    left = [canonical(name) for name in names]
    while left:
        name = left.pop()
        if name in found:
            continue
        try:
            required = [Requirement(line) for line in importlib.metadata.requires(name) or []]
        except importlib.metadata.PackageNotFoundError:  # a distribution for CUDA, not installed here
            continue
        found.add(name)
        plain = [each for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
        left += [canonical(each.name) for each in plain]
    return found


def run_there(code: str, *arguments: str) -> str:
    """Runs `code` in a process that can import no other libraries than INSTALLED. Raises AssertionError with its output
    if it fails.
    """
    there, ours = needed(INSTALLED), {path.name for path in ROOT.iterdir()}
    distributions = importlib.metadata.packages_distributions()
    refused = [
        module
        for module, names in distributions.items()
        if module not in ours and there.isdisjoint(canonical(name) for name in names)
    ]
    assert {"platformdirs", "structlog", "numba", "google"} <= {*refused}
    done = subprocess.run(
        [sys.executable, "-c", REFUSE + code, ",".join(refused), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.thorough
def test_the_gpu_suite_and_benchmark_find_their_imports_and_every_fixture() -> None:
    recipe = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "tests/gpu/pytest.ini" in line)
    arguments = shlex.split(recipe.replace("$(PYTEST_ARGS)", "").partition("-m pytest")[2])
    code = "import pytest; status = pytest.main(sys.argv[1:]); import benchmarks.gpu; sys.exit(status)"
    output = run_there(code, *arguments, "--setup-plan", "-q")
    for path in (ROOT / "tests/gpu").glob("test_*.py"):
        assert path.name in output
    assert "tiny_model_dir" in output and "warning" not in output
