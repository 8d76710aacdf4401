"""Replaces modules of a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def replace_modules(model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> int:
    """Replace each module by what `replacement` returns for it, from the outside in. Returns the number of replaced
    modules.

    Modules inside a replaced one are not visited, and no reference to it is kept, so that weights are freed one by one.
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
