"""What a draft head's config says, in one form for all formats."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from transformers import LlamaConfig


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """One layer: attention with rotary positions `rope` reads, and a gated MLP with SiLU."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_epsilon: float
    qkv_bias: bool
    out_bias: bool
    rope: LlamaConfig


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """EAGLE-1 and EAGLE-2, which have the same head and draft differently."""

    block: BlockSpec
    vocab_size: int
    fc_bias: bool


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """`captured_layers` in the order `fc` takes them, each the stream ENTERING that layer of the target.

    `norm_before_fc`: one norm over all captured states; `fc_norm`: one over each. `norm_before_residual`: the residual
    stream starts with the normed hidden state. `norm_output`: the next step is fed the normed output.
    """

    block: BlockSpec
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    captured_layers: tuple[int, ...]
    fc_bias: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_before_residual: bool
    norm_output: bool
    tied_head: bool


class MtpLayout(Enum):
    """How a multi-token-prediction layer's tensors are named; the embedding goes first into the fusion but in MIMO.

    NEXTN   model.layers.{n}.eh_proj ...        DeepSeek's, Step-3.5's: a layer is fed the previous one's output
    MIMO    model.mtp_layers.{0}.input_proj ... MiMo-7B's: one layer, fed its own normed output
    MIMO_V2 model.mtp.layers.{0}.eh_proj ...    MiMo-V2's: every layer is fed the target's hidden state
    """

    NEXTN = "nextn"
    MIMO = "mimo"
    MIMO_V2 = "mimo_v2"


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """`prefixes`: of each layer's tensors. `num_target_layers`: so many of `model.layers.` are the target's own."""

    block: BlockSpec
    vocab_size: int
    layout: MtpLayout
    prefixes: tuple[str, ...]
    num_target_layers: int


DraftSpec = EagleSpec | Eagle3Spec | MtpSpec
