"""What an installation of some distributions has, for tests that hide everything else."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from packaging.requirements import Requirement

from scripts.lint.requirements import canonical


def needed(names: Iterable[str]) -> set[str]:
    """Returns the distributions with these names that are installed here, and everything they require."""
    found: set[str] = set()
    left = [canonical(name) for name in names]
    while left:
        name = left.pop()
        if name in found:
            continue
        try:
            required = [Requirement(line) for line in importlib.metadata.requires(name) or []]
        except importlib.metadata.PackageNotFoundError:  # a distribution for another system
            continue
        found.add(name)
        plain = [each for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
        left += [canonical(each.name) for each in plain]
    return found


def modules_outside(there: set[str]) -> set[str]:
    """Returns the modules that only distributions outside `there` have."""
    return {
        module
        for module, names in importlib.metadata.packages_distributions().items()
        if there.isdisjoint(canonical(name) for name in names)
    }
