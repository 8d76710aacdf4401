"""The interface of a program: another way to compute a TargetModel's forwards, such as one kernel for all layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from common.attention.backend import ForwardInput
from common.sampling.operators import Largest

OnLayerKv = Mapping[int, Callable[[], None]]
"""Callbacks by layer. Each is called once the KV of its layer and of all earlier ones is in the pool (on CUDA:
enqueued).
"""


NewProgram = Callable[[Callable[[], None]], object]
"""Compiles a model or a draft head into programs. Only the engine that made this callable reads the returned object.

It packs the weights, which takes time, and lets the modules share them, weight by weight. It calls its argument, which
may raise, between parts of this work. Raises OSError if there is no room, and then the modules are as before.
"""


class ProgramOutput(NamedTuple):
    """The output of one forward of T tokens.

    `logits` are [R, vocab] float32, for the R tokens whose logits are wanted. `states` are the captured hidden states
    [T, states * hidden], None if none are captured. `largest` has the token with the largest logit, for each
    of the R tokens; None if the program does not look for it.
    """

    logits: Tensor
    states: Tensor | None
    largest: Largest | None


class ForwardProgram(Protocol):
    """A program: another way to compute a model's forwards than by its modules, such as one kernel for all layers."""

    @property
    def num_layers_begun(self) -> int:
        """The number of layers begun in all forwards so far. It grows while a forward runs. Any thread may read it."""

    def close(self, timeout_s: float) -> bool:
        """Ends the program's threads. Returns False if one did not end within `timeout_s`."""

    def takes(self, batch: ForwardInput) -> bool: ...

    def forward(
        self, batch: ForwardInput, beside: Tensor | None = None, *, on_layer_kv: OnLayerKv | None = None
    ) -> ProgramOutput:
        """Computes a forward of `batch`.

        In a draft head's program, `beside` [T, width] holds the hidden states that the head reads, and the output's
        `states` are the head's outputs. A target's program gets no `beside`. `on_layer_kv` has callbacks by layer, each
        called on the calling thread when the KV of its layer and of all earlier ones is in the pool.
        """

    def prepare(
        self, batch: ForwardInput, beside: Tensor | None = None, *, on_layer_kv: OnLayerKv | None = None
    ) -> Callable[[], ProgramOutput]:
        """Returns a function that computes the forward, as `forward` does, and lets other Python threads run meanwhile.

        Call `prepare` from one thread at a time, and each returned function once, one at a time. Without a tree mask,
        `prepare` does not read the tensors; only the returned function does.
        """
