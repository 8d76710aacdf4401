"""Selects the hidden states of a target that a draft head reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HiddenCapture:
    """The hidden states to capture: the input of each of `layers`, in this order, then the final norm's output if
    `final`.

    Layer ids count from 0. The id after the last layer's stands for the last layer's output.
    """

    layers: tuple[int, ...] = ()
    final: bool = False

    @property
    def num_states(self) -> int:
        return len(self.layers) + self.final
