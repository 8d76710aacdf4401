"""The draft head of multi-token prediction (MTP): layers that were trained together with the target model.

Each layer serves one draft step, or a single one serves all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.draft.block import Block
from common.draft.kernels import Kernels, Op
from common.draft.paged_head import HeadParts, PagedHead, read_embedding
from common.draft.spec import MtpLayout, MtpSpec
from common.model.capture import HiddenCapture


@dataclass(frozen=True, slots=True)
class _Names:
    """The tensor names of one layout, without the layer's prefix.

    `output_head` is empty if the layers have no output head of their own.
    """

    embedding_norm: str
    hidden_norm: str
    fusion: str
    mlp_norm: str
    output_norm: str
    output_head: str = ""


_NAMES = {
    MtpLayout.NEXTN: _Names(
        embedding_norm="enorm",
        hidden_norm="hnorm",
        fusion="eh_proj",
        mlp_norm="post_attention_layernorm",
        output_norm="shared_head.norm",
        output_head="shared_head.head",
    ),
    MtpLayout.MIMO: _Names(
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        fusion="input_proj",
        mlp_norm="post_attention_layernorm",
        output_norm="final_layernorm",
    ),
    MtpLayout.MIMO_V2: _Names(
        embedding_norm="enorm",
        hidden_norm="hnorm",
        fusion="eh_proj",
        mlp_norm="pre_mlp_layernorm",
        output_norm="final_layernorm",
    ),
}
_STEP_NAMES = replace(
    _NAMES[MtpLayout.NEXTN], output_norm="transformer.shared_head.norm", output_head="transformer.shared_head.output"
)
_OF_TARGETS = ("model.embed_tokens.", "model.norm.", "lm_head.")


def belongs_to_target(name: str, spec: MtpSpec) -> bool:
    """Returns True if the tensor is the target's own, in a checkpoint with both the target and its MTP layers."""
    layers = tuple(f"model.layers.{layer}." for layer in range(spec.num_target_layers))
    return name.startswith((*layers, *_OF_TARGETS))


class MtpHead(PagedHead):
    """The multi-token-prediction head, a DraftHead. Each layer computes:

        x = fusion(cat(norm(embedding), norm(hidden)));  out = x + attention(norm(x));  out += mlp(norm(out))
        logits = head(norm(out))

    `forward` returns `out`. MiMo-7B's layout differs: the hidden state comes first in `cat`, and `forward` returns
    norm(out).
    """

    def __init__(self, parts: HeadParts, spec: MtpSpec) -> None:
        parts.require("vocab_size", spec.vocab_size, parts.target.vocab_size)
        parts.require("hidden_size", spec.block.hidden_size, parts.target.hidden_size)
        super().__init__(
            parts,
            spec.block,
            algorithm="mtp",
            num_layers=len(spec.prefixes),
            capture=HiddenCapture(final=True),
            token_ids=torch.arange(spec.vocab_size, device=parts.target.torch_device),
            feeds_target_hidden=spec.layout is MtpLayout.MIMO_V2,
        )
        self._layers = [
            _MtpLayer(parts, spec, prefix, self._kernels, layer) for layer, prefix in enumerate(spec.prefixes)
        ]
        self._chains_normed = spec.layout is MtpLayout.MIMO

    def fuse(self, captured: Tensor) -> Tensor:
        return captured

    @torch.inference_mode()
    def forward(self, batch: ForwardInput, hidden: Tensor, *, layer: int = 0) -> Tensor:
        part = self._layers[layer]
        rotation, plan = self._prepare(batch, hidden)
        x = part.fused(batch.input_ids, hidden)
        output = part.block(part.input_norm(x), x, rotation, plan)
        return part.output_norm(output) if self._chains_normed else output

    @torch.inference_mode()
    def logits(self, hidden: Tensor, *, layer: int = 0) -> Tensor:
        part = self._layers[layer]
        return part.output_head(hidden if self._chains_normed else part.output_norm(hidden)).float()


class _MtpLayer:
    """One layer of the head, with its fusion, norms and output head."""

    def __init__(self, parts: HeadParts, spec: MtpSpec, prefix: str, kernels: Kernels, layer: int) -> None:
        checkpoint, names = parts.checkpoint, _NAMES[spec.layout]
        if spec.layout is MtpLayout.NEXTN and checkpoint.has_prefix(f"{prefix}transformer."):
            names = _STEP_NAMES
        size, epsilon = spec.block.hidden_size, spec.block.norm_epsilon

        def norm(name: str) -> Op:
            return kernels.norm(checkpoint.take(f"{prefix}{name}.weight", size), epsilon)

        self._embedding_norm = norm(names.embedding_norm)
        self._hidden_norm = norm(names.hidden_norm)
        self._fusion = kernels.linear(checkpoint.take(f"{prefix}{names.fusion}.weight", size, 2 * size))
        self._hidden_first = spec.layout is MtpLayout.MIMO
        self.input_norm = norm("input_layernorm")
        self.block = Block(
            checkpoint, prefix, spec.block, kernels, layer=layer, input_size=size, mlp_norm=names.mlp_norm
        )
        self.output_norm = norm(names.output_norm)
        self._embed = read_embedding(parts, f"{prefix}embed_tokens.weight", size)
        self.output_head: Op = parts.target.logits_of
        own_head = f"{prefix}{names.output_head}.weight"
        if names.output_head and own_head in checkpoint:
            self.output_head = kernels.linear(checkpoint.take(own_head, spec.vocab_size, size))

    def fused(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Returns the layer's input: embeddings and hidden states, normed and fused, [T, hidden_size]."""
        states = [self._embedding_norm(self._embed(token_ids)), self._hidden_norm(hidden)]
        return self._fusion(torch.cat(states[::-1] if self._hidden_first else states, dim=-1))
