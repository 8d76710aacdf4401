"""What an installation gets: every package, and every library that the code imports."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("baton", "common", "prefill_service", "decode_service", "training")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> set[str]:
    requirements = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["training"]]
    names = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    return {canonical(found.group()) for found in names if found is not None}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_directory_of_modules_is_a_package(package: str) -> None:
    directories = {path.parent for path in (ROOT / package).rglob("*.py")}
    assert sorted(str(path) for path in directories if not (path / "__init__.py").exists()) == []


def test_every_imported_library_is_declared() -> None:
    """A library that is only there because another one needs it disappears with it."""
    graph = grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)
    roots = {name.partition(".")[0] for name in graph.modules if graph.is_module_squashed(name)}
    distributions = importlib.metadata.packages_distributions()
    # One namespace of several distributions; google.protobuf and google.rpc are what we import of it.
    third_party = roots - set(sys.stdlib_module_names) - {"google"}
    undeclared = {
        root for root in third_party if declared().isdisjoint(canonical(name) for name in distributions.get(root, []))
    }
    assert undeclared == set()


def test_the_console_script_is_a_function_we_ship() -> None:
    (script,) = [entry for entry in importlib.metadata.entry_points(group="console_scripts") if entry.name == "baton"]
    assert script.value == PROJECT["scripts"]["baton"]
    assert callable(script.load())


def test_torch_and_transformers_stay_ranges() -> None:
    """An exact version, or a local one, would keep pip from taking the newest build on offer."""
    assert "torch>=2.11,<2.14" in PROJECT["dependencies"]
    assert "transformers>=5.17,<6" in PROJECT["dependencies"]
