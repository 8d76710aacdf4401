"""What a TargetModel asks of another way to compute its forwards, such as one kernel for all of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from common.model.attention import ForwardInput

OnLayerKv = Mapping[int, Callable[[], None]]
"""By layer: what to call once its KV, and so that of all before it, is in the pool (on CUDA: enqueued)."""


NewProgram = Callable[[Callable[[], None]], object]
"""Writes a model or a head down as programs, for the engine that made this callable and alone reads what it returns.

It packs the weights once more, which takes memory and time. Its argument is called between parts of them, and may
raise. Raises OSError where there is no room for them.
"""


@dataclass(frozen=True, slots=True)
class Largest:
    """Of each row of logits: `token_ids` [R] int64, the first of its largest or its first NaN, and `are_not_finite` [R]
    bool, of the logits there.
    """

    token_ids: Tensor
    are_not_finite: Tensor


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
        """Over all forwards, growing while one runs. May be asked from any thread."""

    def close(self, timeout_s: float) -> bool:
        """End its threads; it computes nothing any more. False when one did not end within `timeout_s`."""

    def takes(self, batch: ForwardInput) -> bool: ...

    def forward(
        self, batch: ForwardInput, beside: Tensor | None = None, *, on_layer_kv: OnLayerKv | None = None
    ) -> ProgramOutput:
        """`beside` [T, width]: what a program of a draft head reads beside the tokens; its states are its outputs."""

    def prepare(
        self, batch: ForwardInput, beside: Tensor | None = None, *, on_layer_kv: OnLayerKv | None = None
    ) -> Callable[[], ProgramOutput]:
        """What computes it without the interpreter's lock: to be called once, each in the order it was prepared.

        Without a tree mask no tensor is read before that call.
        """
