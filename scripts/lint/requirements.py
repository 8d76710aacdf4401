"""What an installation declares: each directory of modules is a package of it, and each library that we import is
required by it.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator

import grimp

from scripts.lint.problem import ROOT, Problem, line_of

PYPROJECT = ROOT / "pyproject.toml"
PROJECT = tomllib.loads(PYPROJECT.read_text())["project"]
PACKAGES = tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"]["root_packages"]
PARTS: dict[str, tuple[str, ...]] = {
    "baton.client": (),
    "prefill_service": ("engine", "gpu", "nixl", "quantized"),
    "decode_service": ("engine", "gpu", "nixl", "quantized"),
    "gateway": ("gateway",),
    "baton_ray": ("engine", "gateway", "ray"),
    "training": ("engine", "gpu", "training", "quantized"),
}
"""For each part of our code, the extras that it may need."""


def every_directory_of_modules_is_a_package() -> Iterator[Problem]:
    for package in PACKAGES:
        for directory in sorted({path.parent for path in (ROOT / package).rglob("*.py")}):
            if not (directory / "__init__.py").exists():
                yield Problem(directory, 0, "has no __init__.py, so it is not installed")


def every_imported_library_is_declared() -> Iterator[Problem]:
    """A library that is installed only because another one needs it may disappear together with that one."""
    graph = grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)
    distributions = importlib.metadata.packages_distributions()
    # Namespaces of several distributions. We import google.protobuf and google.rpc of google.
    known = {*sys.stdlib_module_names, "google", "opentelemetry"}
    for part, extras in PARTS.items():
        imported = {
            name for name in graph.find_upstream_modules(part, as_package=True) if graph.is_module_squashed(name)
        }
        for root in sorted({name.partition(".")[0] for name in imported} - known):
            if declared(*extras).isdisjoint(canonical(name) for name in distributions.get(root, [root])):
                yield Problem(PYPROJECT, 0, f"{part} imports {root}, which none of its extras declares")


def torch_and_transformers_are_ranges() -> Iterator[Problem]:
    """With an exact version, pip could not take the newest build on offer."""
    text = PYPROJECT.read_text()
    for line in PROJECT["optional-dependencies"]["engine"]:
        if re.match(r"(torch|transformers)\b(?!>=[\d.]+,<[\d.]+$)", line):
            yield Problem(PYPROJECT, line_of(text, line), f"{line} is not a range")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    """Returns the distributions that an installation with these extras declares, with those of the extras that these
    need.
    """
    requirements = [*PROJECT["dependencies"]]
    for extra in (*extras, "process") if extras else ():
        requirements += PROJECT["optional-dependencies"][extra]
    return {canonical(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}
