"""Which of a target's hidden states a draft head reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HiddenCapture:
    """The residual stream entering each of `layers`, in this order, then, if `final`, what leaves the final norm.

    Layer ids count from 0 to the number of layers; the latter is the stream that leaves the last layer.
    """

    layers: tuple[int, ...] = ()
    final: bool = False

    @property
    def num_states(self) -> int:
        return len(self.layers) + self.final
