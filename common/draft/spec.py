"""Specifications of draft heads: the contents of their configs, in the same form for all file formats."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from transformers import LlamaConfig


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """The sizes of one transformer layer: attention with rotary positions (`rope`) and a gated MLP with SiLU."""

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
    """The specification of an EAGLE-1 or EAGLE-2 head. Both have the same layers; only the way of drafting differs."""

    block: BlockSpec
    vocab_size: int
    fc_bias: bool


@dataclass(frozen=True, slots=True)
class Eagle3Spec:
    """The specification of an EAGLE-3 head.

    - `captured_layers`: the head reads the residual stream ENTERING each of these target layers, in the order in which
      its projection `fc` takes them.
    - `norm_before_fc`: one norm over all captured states together. `fc_norm`: a norm over each of them.
    - `norm_before_residual`: the residual stream starts with the normed hidden state.
    - `norm_output`: the next draft step gets the normed output.
    - `tied_head`: the output head is the head's own embedding, if the checkpoint has one.
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
    """The known layouts of multi-token-prediction layers, which differ in tensor names and in the layers' inputs.

    The fusion's input is (embedding, hidden state); in MIMO it is (hidden state, embedding). The first layer's
    number is n, the target's number of layers, or 0:

    NEXTN   model.layers.{n}.eh_proj ...      DeepSeek, Step-3.5: a layer gets the output of the previous one
    MIMO    model.mtp_layers.0.input_proj ... MiMo-7B: one layer, which gets its own normed output
    MIMO_V2 model.mtp.layers.0.eh_proj ...    MiMo-V2: every layer gets the target's hidden state
    """

    NEXTN = "nextn"
    MIMO = "mimo"
    MIMO_V2 = "mimo_v2"


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """The specification of a multi-token-prediction head.

    `prefixes` has the prefix of each layer's tensor names. The first `num_target_layers` layers of the checkpoint's
    `model.layers.` are the target's own.
    """

    block: BlockSpec
    vocab_size: int
    layout: MtpLayout
    prefixes: tuple[str, ...]
    num_target_layers: int


DraftSpec = EagleSpec | Eagle3Spec | MtpSpec
