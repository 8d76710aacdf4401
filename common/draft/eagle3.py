"""The draft head of EAGLE-3.

It is one transformer layer, whose input is twice as wide as the hidden state: a token's embedding and a hidden state,
each normed, next to each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.draft.block import Block
from common.draft.checkpoint import Checkpoint
from common.draft.kernels import Op
from common.draft.paged_head import HeadParts, PagedHead, read_embedding
from common.draft.spec import Eagle3Spec
from common.model.capture import HiddenCapture


class Eagle3Head(PagedHead):
    """The EAGLE-3 head, a DraftHead. `captured` are hidden states of some of the target's layers. It computes:

        g = fc(captured);  x = cat(norm(embedding), norm(g));  out = g + attention(x);  out += mlp(norm(out))
        logits = lm_head(norm(out));  the next step's g is `out`

    `forward` returns `out`, or norm(out) if the spec has `norm_output`.
    """

    def __init__(self, parts: HeadParts, spec: Eagle3Spec) -> None:
        parts.require("vocab_size", spec.vocab_size, parts.target.vocab_size)
        parts.require("target_hidden_size", spec.target_hidden_size, parts.target.hidden_size)
        checkpoint = parts.checkpoint
        super().__init__(
            parts,
            spec.block,
            algorithm="eagle3",
            num_layers=1,
            capture=HiddenCapture(layers=spec.captured_layers),
            token_ids=_token_ids(
                checkpoint,
                vocab_size=spec.vocab_size,
                draft_vocab_size=spec.draft_vocab_size,
                device=parts.target.torch_device,
            ),
        )
        size, epsilon = spec.block.hidden_size, spec.block.norm_epsilon

        def norm(name: str, width: int) -> Op:
            return self._kernels.norm(checkpoint.take(f"{name}.weight", width), epsilon)

        num_states, width = len(spec.captured_layers), spec.target_hidden_size
        self._width = num_states * width
        self._fc = self._kernels.linear(
            checkpoint.take("fc.weight", size, self._width),
            checkpoint.take("fc.bias", size) if spec.fc_bias else None,
        )
        self._input_norm = norm("input_norm", self._width) if spec.norm_before_fc else None
        self._fc_norms = [norm(f"fc_norm.{state}", width) for state in range(num_states)] if spec.fc_norm else []
        prefix = "midlayer." if checkpoint.has_prefix("midlayer.") else "layers.0."
        self._embedding_norm = norm(f"{prefix}input_layernorm", size)
        self._hidden_norm = norm(f"{prefix}hidden_norm", size)
        self._block = Block(checkpoint, prefix, spec.block, self._kernels, layer=0, input_size=2 * size)
        self._norm = norm("norm", size)
        self._norm_before_residual = spec.norm_before_residual
        self._norm_output = spec.norm_output
        own_embedding = "embed_tokens.weight" in checkpoint
        self._embed = read_embedding(parts, "embed_tokens.weight", size)
        self._lm_head = self._read_lm_head(parts, spec, tied=spec.tied_head and own_embedding)

    def _read_lm_head(self, parts: HeadParts, spec: Eagle3Spec, *, tied: bool) -> Op:
        """Returns the output head: the checkpoint's, or else the tied embedding (if `tied`), or else the target's.

        Raises DraftMismatch if the checkpoint lacks one and neither of the others fits.
        """
        checkpoint, name = parts.checkpoint, "lm_head.weight"
        if name in checkpoint:
            return self._kernels.linear(checkpoint.take(name, spec.draft_vocab_size, spec.block.hidden_size))
        if spec.draft_vocab_size != spec.vocab_size:
            raise checkpoint.mismatch(f"{name} is missing: {spec.draft_vocab_size} ids of {spec.vocab_size}")
        if tied:
            return self._kernels.linear(self._embed(self.token_ids))
        if spec.block.hidden_size != parts.target.hidden_size:
            raise checkpoint.mismatch(f"{name} is missing: the target's is {parts.target.hidden_size} wide")
        return parts.target.logits_of

    @torch.inference_mode()
    def fuse(self, captured: Tensor) -> Tensor:
        assert captured.shape[1] == self._width, "the states are the head's own capture"
        if self._input_norm is not None:
            captured = self._input_norm(captured)
        if self._fc_norms:
            chunks = captured.chunk(len(self._fc_norms), dim=-1)
            captured = torch.cat([norm(chunk) for norm, chunk in zip(self._fc_norms, chunks, strict=True)], dim=-1)
        return self._fc(captured)

    @torch.inference_mode()
    def forward(self, batch: ForwardInput, hidden: Tensor, *, layer: int = 0) -> Tensor:
        assert layer == 0, "one layer serves every step"
        rotation, plan = self._prepare(batch, hidden)
        normed = self._hidden_norm(hidden)
        x = torch.cat([self._embedding_norm(self._embed(batch.input_ids)), normed], dim=-1)
        output = self._block(x, normed if self._norm_before_residual else hidden, rotation, plan)
        return self._norm(output) if self._norm_output else output

    @torch.inference_mode()
    def logits(self, hidden: Tensor, *, layer: int = 0) -> Tensor:
        return self._lm_head(hidden if self._norm_output else self._norm(hidden)).float()


def _token_ids(checkpoint: Checkpoint, *, vocab_size: int, draft_vocab_size: int, device: torch.device) -> Tensor:
    """Returns the target's token id of each draft id: [draft_vocab_size] int64, ascending.

    The checkpoint's tensor `d2t` holds offsets: target id = draft id + d2t[draft id]. It may be absent if the
    vocabulary is not reduced. The tensor `t2d` marks the target ids that have a draft id. It may be absent too, but
    must agree with `d2t`. Raises DraftMismatch if a tensor is missing or invalid, or if they disagree.
    """
    if draft_vocab_size > vocab_size:
        raise checkpoint.mismatch(f"draft_vocab_size {draft_vocab_size} exceeds vocab_size {vocab_size}")
    token_ids = torch.arange(draft_vocab_size, device=device)
    if draft_vocab_size < vocab_size or "d2t" in checkpoint:
        token_ids = token_ids + checkpoint.take_integers("d2t", draft_vocab_size)
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
            raise checkpoint.mismatch(f"d2t leads outside the target's {vocab_size} ids")
        if not bool((token_ids[1:] > token_ids[:-1]).all()):
            raise checkpoint.mismatch("d2t: the target ids i + d2t[i] are not strictly ascending")
    if "t2d" in checkpoint:
        expected = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        expected[token_ids] = 1
        if not torch.equal(checkpoint.take_integers("t2d", vocab_size), expected):
            raise checkpoint.mismatch("t2d marks other target ids than d2t leads to")
    return token_ids
