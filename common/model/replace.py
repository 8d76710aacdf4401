"""Putting other modules in place of a model's own."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def replace_modules(model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> int:
    """Put what `replacement` gives in each module's place, from the outside in. Returns how many were replaced.

    Nothing below a replaced module is looked at, and nobody here holds on to it: its weights are freed one by one.
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
