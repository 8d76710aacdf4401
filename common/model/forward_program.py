"""The interface of another way to compute a TargetModel's forwards, such as one kernel for the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from common.attention.backend import ForwardInput
from common.sampling.operators import Largest

OnLayerKv = Mapping[int, Callable[[], None]]
"""By layer: what to call once its KV, and so that of all before it, is in the pool (on CUDA: enqueued)."""


NewProgram = Callable[[Callable[[], None]], object]
"""Writes a model or a head down as programs, for the engine that made this callable and alone reads what it returns.

It packs the weights once more, which takes memory and time. Its argument is called between parts of them, and may
raise. Raises OSError where there is no room for them.
"""


class ProgramOutput(NamedTuple):
    """`logits` [R, vocab] float32; `states` [T, states * hidden], None unless captured; `largest` of the logits, None
    where the program does not look for them.
    """

    logits: Tensor
    states: Tensor | None
    largest: Largest | None


class ForwardProgram(Protocol):
    """Another way to compute a model's forwards."""

    @property
    def num_layers_begun(self) -> int:
        """Counts layers over all forwards, and grows while one runs. Any thread may ask."""

    def close(self, timeout_s: float) -> bool:
        """End its threads. Returns False if one did not end within `timeout_s`."""

    def takes(self, batch: ForwardInput) -> bool: ...

    def forward(
        self, batch: ForwardInput, beside: Tensor | None = None, *, on_layer_kv: OnLayerKv | None = None
    ) -> ProgramOutput:
        """`beside` [T, width] is what a draft head's program reads besides the tokens; its states are its outputs."""

    def prepare(
        self, batch: ForwardInput, beside: Tensor | None = None, *, on_layer_kv: OnLayerKv | None = None
    ) -> Callable[[], ProgramOutput]:
        """Returns a call that computes the forward without the interpreter's lock. Call each once, in the order of
        preparation.

        Without a tree mask no tensor is read before that call.
        """
