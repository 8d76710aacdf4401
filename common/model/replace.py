"""Replaces modules inside a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def replace_modules(model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> int:
    """Replaces each module for which `replacement` returns a new one (None keeps it), outermost modules first.

    Returns the number of replaced modules. Modules inside a replaced one are not visited. No reference to a replaced
    module is kept, so weights are freed one by one.
    """
    num_replaced = 0
    for name in [name for name, _ in model.named_children()]:
        child = model.get_submodule(name)
        new = replacement(child)
        if new is None:
            num_replaced += replace_modules(child, replacement)
        else:
            setattr(model, name, new)
            num_replaced += 1
    return num_replaced
