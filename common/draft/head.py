"""The interface of draft heads, which the engines use for every family and format of heads.

    target.forward ──captured [T, states * H]──▶ fuse ──[T, h]──▶ forward(ids of the NEXT tokens) ──[T, h]──▶ logits
                                                                      ▲                       │
                                                                      └──── chained steps ────┘

T counts tokens, H is the target's hidden size, h the head's. Entry t pairs the target's hidden state of token t with
the embedding of token t + 1, at the position and in the KV slot of token t. A head with one layer does all of this in
one call: `extend` starts from the target's hidden states, `step` from the head's own outputs.
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
    """The results for the R tokens whose logits are wanted.

    `hidden` [R, hidden size of the head] are the head's states after its last layer. `logits` [R, vocabulary of the
    head] are float32.
    """

    hidden: Tensor
    logits: Tensor


class DraftHead(Protocol):
    """A small model that drafts tokens for a target model, from the target's hidden states.

    Call its methods from one thread at a time. On CUDA they only enqueue work.

    - `dtype`: the name of the dtype of hidden states and logits.
    - `layer_group`: the shape of the head's KV. It has one layer for all draft steps, or layer i for step i.
    - `capture`: which hidden states of the target the head reads.
    - `token_ids` [Vd] int64, ascending: the target's token id of each draft logit. Vd is the size of the head's
      vocabulary, which may be a part of the target's.
    - `feeds_target_hidden`: if True, every layer gets the target's hidden state; if False, layers after the first get
      the previous layer's output.
    """

    @property
    def algorithm(self) -> str:
        """The algorithm's name: `eagle`, `eagle3` or `mtp`."""

    @property
    def dtype(self) -> str: ...

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
        """Converts captured hidden states of the target to the hidden states that the head's `forward` takes.

        Shapes: `captured` [T, states * H], as the target's forward returns them, for T tokens and the target's hidden
        size H. The result is [T, h], where h is the head's hidden size.
        """

    def forward(self, batch: ForwardInput, hidden: Tensor, *, layer: int = 0) -> Tensor:
        """Computes one layer for the batch's T tokens. Returns its output, [T, h], where h is the head's hidden size.

        `hidden` [T, h] are the states of the tokens at `batch.positions`: the result of `fuse`, or an earlier output.
        The tokens' KV is written to `batch.kv[layer]`; `batch.kv` is the draft head's KV. `batch.input_ids` are the
        tokens AFTER those at `batch.positions`.
        """

    def logits(self, hidden: Tensor, *, layer: int = 0) -> Tensor:
        """Returns the logits of `hidden`, which are outputs of `forward` for the same `layer`, for R tokens.

        Shapes: `hidden` [R, hidden size of the head]; the result is [R, vocabulary of the head] float32.
        """

    def extend(self, batch: ForwardInput, captured: Tensor) -> DraftOutput:
        """Runs `fuse` on `captured`, the target's hidden states, then `forward`, then `logits`.

        Returns the results of the tokens `batch.logits_rows` (None: of all). Only for a head with one layer.
        """

    def step(self, batch: ForwardInput, hidden: Tensor) -> DraftOutput:
        """Runs `forward`, then `logits`. `hidden` are outputs of the head itself, from its previous step or `extend`.

        Returns the results of the tokens `batch.logits_rows` (None: of all). Only for a head with one layer.
        """


class HeadProgram(Protocol):
    """A compiled program for `extend` and `step` of a head with one layer. `takes` says which batches it supports."""

    def takes(self, batch: ForwardInput) -> bool: ...

    def extend(self, batch: ForwardInput, captured: Tensor) -> DraftOutput: ...

    def step(self, batch: ForwardInput, hidden: Tensor) -> DraftOutput: ...


def output_of(head: DraftHead, batch: ForwardInput, hidden: Tensor) -> DraftOutput:
    """Runs the head's `forward` for all tokens of the batch, then its `logits` for `batch.logits_rows` (None: for all).

    Returns the outputs and the logits of these tokens. `hidden` is the input of `forward`.
    """
    output = head.forward(replace(batch, logits_rows=None), hidden)
    if batch.logits_rows is not None:
        output = output[batch.logits_rows]
    return DraftOutput(output, head.logits(output))
