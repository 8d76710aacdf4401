"""Tests that `make gpu` and the GPU benchmark run on a machine on which nothing was installed for them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.platform.distributions import modules_outside, needed

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


def run_there(code: str, *arguments: str) -> str:
    """Runs `code` in a process that can import no other libraries than INSTALLED. Raises AssertionError with its output
    if it fails.
    """
    refused = modules_outside(needed(INSTALLED)) - {path.name for path in ROOT.iterdir()}
    assert {"platformdirs", "structlog", "numba", "google"} <= refused
    done = subprocess.run(
        [sys.executable, "-c", REFUSE + code, ",".join(sorted(refused)), *arguments],
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
