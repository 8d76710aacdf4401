"""Tests that an installation contains every package of ours, and every library that the code imports."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = ("baton", "baton_cpu", "baton_ray", "common", "prefill_service", "decode_service", "gateway", "training")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    """Returns the distributions that an installation with these extras declares, with those of the extras that these
    need.
    """
    requirements = [*PROJECT["dependencies"]]
    for extra in (*extras, "process") if extras else ():
        requirements += PROJECT["optional-dependencies"][extra]
    names = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    return {canonical(found.group()) for found in names if found is not None}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_directory_of_modules_is_a_package(package: str) -> None:
    directories = {path.parent for path in (ROOT / package).rglob("*.py")}
    assert sorted(str(path) for path in directories if not (path / "__init__.py").exists()) == []


@pytest.mark.parametrize(
    ("part", "extras"),
    [
        ("baton.client", ()),
        ("prefill_service", ("engine", "gpu", "nixl", "quantized")),
        ("decode_service", ("engine", "gpu", "nixl", "quantized")),
        ("gateway", ("gateway",)),
        ("baton_ray", ("engine", "gateway", "ray")),
        ("training", ("engine", "gpu", "training", "quantized")),
    ],
)
def test_every_imported_library_is_declared(part: str, extras: tuple[str, ...]) -> None:
    """A library that is installed only because another one needs it may disappear together with that one."""
    graph = grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)
    imported = graph.find_upstream_modules(part, as_package=True)
    roots = {name.partition(".")[0] for name in imported if graph.is_module_squashed(name)}
    distributions = importlib.metadata.packages_distributions()
    # Namespaces of several distributions. We import google.protobuf and google.rpc of google.
    third_party = roots - set(sys.stdlib_module_names) - {"google", "opentelemetry"}
    undeclared = {
        root
        for root in third_party
        if declared(*extras).isdisjoint(canonical(name) for name in distributions.get(root, [root]))
    }
    assert undeclared == set()


def test_the_command_line_starts_without_the_services_libraries() -> None:
    """A command that needs one of these libraries names the extra to install."""
    names = {
        canonical(re.match(r"[\w.-]+", line).group())  # type: ignore[union-attr]
        for extra in ("engine", "gateway", "process")
        for line in PROJECT["optional-dependencies"][extra]
    }
    only_there = names - declared() - {"baton-serve"}
    roots = [
        root
        for root, distributions in importlib.metadata.packages_distributions().items()
        if root not in ("google", "opentelemetry") and only_there & {canonical(name) for name in distributions}
    ]
    assert {"torch", "numpy", "starlette", "structlog"} <= {*roots}
    hide = f"import sys; sys.modules.update(dict.fromkeys({roots!r}))"
    run = "from baton.cli.main import main; sys.argv = ['baton', 'demo']; main()"
    result = subprocess.run(
        [sys.executable, "-c", f"{hide}; {run}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(
        r"FAILED_PRECONDITION: this command needs \w+: pip install 'baton-serve\[.*\]'\n", result.stderr
    )


def installed_with(*extras: str) -> set[str]:
    """Returns the distributions that an installation with these extras has, with all their requirements."""
    found: set[str] = set()
    pending = declared(*extras)
    while pending - found:
        name = (pending - found).pop()
        found.add(name)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a requirement for another system
            for line in importlib.metadata.requires(name) or ():
                requirement = Requirement(line)
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    pending.add(canonical(requirement.name))
    return found


def test_the_services_load_a_model_with_what_they_declare(tiny_model_dir: Callable[[str], Path]) -> None:
    """transformers imports some libraries only when it is called, and the machine of this test may have libraries that
    a user's has not.
    """
    there = installed_with("engine")
    hidden = [
        root
        for root, distributions in importlib.metadata.packages_distributions().items()
        if there.isdisjoint(canonical(name) for name in distributions)
    ]
    assert "hypothesis" in hidden and not {"torch", "numpy", "tokenizers"} & set(hidden)
    hide = f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))"
    load = f"load_target(Path({str(tiny_model_dir('llama'))!r}), device='cpu', dtype='float32')"
    run = f"from pathlib import Path; from common.model.loader import load_target; {load}"
    result = subprocess.run(
        [sys.executable, "-c", f"{hide}; {run}"], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_console_script_is_a_function_we_ship() -> None:
    (script,) = [entry for entry in importlib.metadata.entry_points(group="console_scripts") if entry.name == "baton"]
    assert script.value == PROJECT["scripts"]["baton"]
    assert callable(script.load())


def test_torch_and_transformers_stay_ranges() -> None:
    """With an exact or local version, pip could not take the newest build on offer."""
    assert "torch>=2.11,<2.14" in PROJECT["optional-dependencies"]["engine"]
    assert "transformers>=5.24,<5.25" in PROJECT["optional-dependencies"]["engine"]
