"""What the engines ask of a draft head, whichever family and format it came in.

    target.forward ──captured [T, states * H]──▶ fuse ──[T, h]──▶ forward(ids of the NEXT tokens) ──[T, h]──▶ logits
                                                                      ▲                       │
                                                                      └──── chained steps ────┘

Row t pairs the target's hidden state of token t with the embedding of token t + 1, at position t and KV slot t. What a
head with one layer does at each step is one call: `extend` from the target's states, `step` from its own outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from common.attention.backend import ForwardInput
from common.kv.layer_group import LayerGroupSpec
from common.model.capture import HiddenCapture


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """For the tokens whose logits are wanted: the outputs of `forward` [R, h], and logits [R, Vd] float32."""

    hidden: Tensor
    logits: Tensor


class DraftHead(Protocol):
    """Its methods are called from one thread at a time; on CUDA they only enqueue.

    `layer_group` shapes the head's KV: one layer that serves every step, or layer i for step i. `token_ids` [Vd] int64,
    ascending, is the target id of each draft logit. With `feeds_target_hidden` later layers are fed the target's hidden
    state, else the previous layer's output.
    """

    @property
    def algorithm(self) -> str:
        """`eagle`, `eagle3` or `mtp`."""

    @property
    def layer_group(self) -> LayerGroupSpec: ...

    @property
    def capture(self) -> HiddenCapture: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def token_ids(self) -> Tensor: ...

    @property
    def feeds_target_hidden(self) -> bool: ...

    def fuse(self, captured: Tensor) -> Tensor:
        """The target's captured states [T, states * H] as the hidden states that `forward` takes, [T, h]."""

    def forward(self, batch: ForwardInput, hidden: Tensor, *, layer: int = 0) -> Tensor:
        """Compute one layer for the batch's tokens, write their KV to `batch.kv[layer]`, return its output [T, h].

        `batch.input_ids` are the tokens AFTER those at `batch.positions`; `batch.kv` is the draft group's.
        """

    def logits(self, hidden: Tensor, *, layer: int = 0) -> Tensor:
        """[R, Vd] float32 from outputs [R, h] of `forward`."""

    def extend(self, batch: ForwardInput, captured: Tensor) -> DraftOutput:
        """`fuse`, `forward`, and the logits of `batch.logits_rows`, for a head with one layer."""

    def step(self, batch: ForwardInput, hidden: Tensor) -> DraftOutput:
        """`forward`, and the logits of `batch.logits_rows`, for a head with one layer."""


class HeadProgram(Protocol):
    """Another way to compute `extend` and `step` of a head with one layer."""

    def takes(self, batch: ForwardInput) -> bool: ...

    def extend(self, batch: ForwardInput, captured: Tensor) -> DraftOutput: ...

    def step(self, batch: ForwardInput, hidden: Tensor) -> DraftOutput: ...


def output_of(head: DraftHead, batch: ForwardInput, hidden: Tensor) -> DraftOutput:
    """Calls `forward`, then `logits`."""
    output = head.forward(replace(batch, logits_rows=None), hidden)
    if batch.logits_rows is not None:
        output = output[batch.logits_rows]
    return DraftOutput(output, head.logits(output))
