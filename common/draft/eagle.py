"""The draft head of EAGLE-1 and EAGLE-2.

A linear layer fuses a token's embedding and a hidden state into the input of a single transformer layer. The logits
come from the target model's output head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.draft.block import Block
from common.draft.paged_head import HeadParts, PagedHead, read_embedding
from common.draft.spec import EagleSpec
from common.model.capture import HiddenCapture


class EagleHead(PagedHead):
    """The EAGLE-1 and EAGLE-2 head, a DraftHead. It computes:

        x = fc(cat(embedding, hidden));  out = x + attention(x);  out += mlp(norm(out))
        logits = the target's output head(out);  the next step's hidden is `out`

    In the first step `hidden` is the output of the target's final norm.
    """

    def __init__(self, parts: HeadParts, spec: EagleSpec) -> None:
        size = spec.block.hidden_size
        parts.require("vocab_size", spec.vocab_size, parts.target.vocab_size)
        parts.require("hidden_size", size, parts.target.hidden_size)
        checkpoint = parts.checkpoint
        super().__init__(
            parts,
            spec.block,
            algorithm="eagle",
            num_layers=1,
            capture=HiddenCapture(final=True),
            token_ids=torch.arange(spec.vocab_size, device=parts.target.torch_device),
        )
        self._fc = self._kernels.linear(
            checkpoint.take("fc.weight", size, 2 * size),
            checkpoint.take("fc.bias", size) if spec.fc_bias else None,
        )
        self._block = Block(checkpoint, "layers.0.", spec.block, self._kernels, layer=0, input_size=size)
        self._embed = read_embedding(parts, "embed_tokens.weight", size)
        self._output_head = parts.target.logits_of

    def fuse(self, captured: Tensor) -> Tensor:
        return captured

    @torch.inference_mode()
    def forward(self, batch: ForwardInput, hidden: Tensor, *, layer: int = 0) -> Tensor:
        assert layer == 0, "one layer serves every step"
        rotation, plan = self._prepare(batch, hidden)
        x = self._fc(torch.cat([self._embed(batch.input_ids), hidden], dim=-1))
        return self._block(x, x, rotation, plan)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, *, layer: int = 0) -> Tensor:
        logits: Tensor = self._output_head(hidden)
        return logits.float()
