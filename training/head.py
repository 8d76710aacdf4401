"""The draft head as a trainable module. Its parameters have the names of the EAGLE-3 format.

It is trained with the training-time test, for all positions of a sequence at once: every position i starts a chain of
draft steps, and each step but the first works on the output of the step before instead of the target's states. Query i
of step s stands for position i + s of the chain that started at i. It attends

    step 0   to the keys of step 0 at positions up to i, which are made from the target's states
    step s   to these, and for each step from 1 to s to one more key: the one that its own chain made
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

from common.draft.spec import BlockSpec, Eagle3Spec
from training.target import FrozenTarget

_INIT_STD = 0.02
_FUSION_STD = 0.005
_LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")


class _RmsNorm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self._epsilon)


def _linear(num_inputs: int, num_outputs: int) -> nn.Linear:
    return nn.Linear(num_inputs, num_outputs, bias=False)


class _Attention(nn.Module):
    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = _linear(2 * spec.hidden_size, size)
        self.k_proj = _linear(2 * spec.hidden_size, kv_size)
        self.v_proj = _linear(2 * spec.hidden_size, kv_size)
        self.o_proj = _linear(size, spec.hidden_size)


class _Mlp(nn.Module):
    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.gate_proj = _linear(spec.hidden_size, spec.intermediate_size)
        self.up_proj = _linear(spec.hidden_size, spec.intermediate_size)
        self.down_proj = _linear(spec.intermediate_size, spec.hidden_size)


class _Layer(nn.Module):
    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.input_layernorm = _RmsNorm(spec.hidden_size, spec.norm_epsilon)
        self.hidden_norm = _RmsNorm(spec.hidden_size, spec.norm_epsilon)
        self.self_attn = _Attention(spec)
        self.post_attention_layernorm = _RmsNorm(spec.hidden_size, spec.norm_epsilon)
        self.mlp = _Mlp(spec)


class TrainableHead(nn.Module):
    """The draft head for training: weights in float32, computation in `dtype`, positions below `max_length`."""

    def __init__(self, spec: Eagle3Spec, *, max_length: int, dtype: torch.dtype) -> None:
        super().__init__()
        block = spec.block
        self.fc = _linear(len(spec.captured_layers) * spec.target_hidden_size, block.hidden_size)
        self.midlayer = _Layer(block)
        self.norm = _RmsNorm(block.hidden_size, block.norm_epsilon)
        self.lm_head = _linear(block.hidden_size, spec.draft_vocab_size)
        self._dtype = dtype
        self._num_heads, self._num_kv_heads, self._head_dim = block.num_heads, block.num_kv_heads, block.head_dim
        angles = LlamaRotaryEmbedding(block.rope)(torch.empty(0, dtype=dtype), torch.arange(max_length).unsqueeze(0))
        self.register_buffer("_cosines", angles[0][0], persistent=False)
        self.register_buffer("_sines", angles[1][0], persistent=False)

    def matrices(self) -> list[nn.Parameter]:
        """Returns all two-dimensional weights except the output layer's."""
        return [weight for weight in self.parameters() if weight.dim() == 2 and weight is not self.lm_head.weight]

    def chain(self, aux: Tensor, embedded: Callable[[int], Tensor], num_steps: int) -> Iterator[Tensor]:
        """Runs `num_steps` draft steps and yields the output [B, L, h] of each, before the final norm.

        `aux` [B, L, layers * H] are the target's states. `embedded(s)` returns the embeddings [B, L, H] of the input
        tokens of step s; at position i that is the token i + 1 + s.
        """
        attn, mlp = self.midlayer.self_attn, self.midlayer.mlp
        qkv = self._cast(attn.q_proj, attn.k_proj, attn.v_proj)
        gate_up, down, out = self._cast(mlp.gate_proj, mlp.up_proj), self._cast(mlp.down_proj), self._cast(attn.o_proj)
        length = aux.shape[1]
        attention = ChainAttention(length, dtype=self._dtype, device=aux.device)
        hidden = linear(aux.to(self._dtype), self._cast(self.fc))
        for step in range(num_steps):
            embeddings = self.midlayer.input_layernorm(embedded(step).to(self._dtype))
            x = torch.cat([embeddings, self.midlayer.hidden_norm(hidden)], dim=-1)
            heads = linear(x, qkv).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            query, key, value = heads.split((self._num_heads, self._num_kv_heads, self._num_kv_heads), dim=1)
            place = slice(step, step + length)
            attended = attention.attend(self._rotated(query, place), self._rotated(key, place), value)
            hidden = hidden + linear(attended.transpose(1, 2).flatten(2), out)
            gate, up = linear(self.midlayer.post_attention_layernorm(hidden), gate_up).chunk(2, dim=-1)
            hidden = hidden + linear(silu(gate) * up, down)
            yield hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [N, Vd] over the draft vocabulary for outputs [N, h] of `chain`."""
        return linear(self.norm(hidden), self._cast(self.lm_head))

    def _cast(self, *layers: nn.Linear) -> Tensor:
        weights = [layer.weight.to(self._dtype) for layer in layers]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def _rotated(self, x: Tensor, place: slice) -> Tensor:
        rotated: Tensor = x * self._cosines[place] + rotate_half(x) * self._sines[place]  # type: ignore[index]
        return rotated


@torch.no_grad()
def initialize(head: TrainableHead, target: FrozenTarget, token_ids: Tensor, *, seed: int) -> bool:
    """Initialises the head from the target. Returns whether it took over the target's last layer.

    The output layer gets the target's output rows of the draft vocabulary `token_ids`. The decoder layer gets the
    weights of the target's last layer, if that layer computes like Llama's, with Llama's names and shapes; then the
    head starts as that layer, applied to the last captured state. Otherwise the decoder layer starts with random
    weights.
    """
    generator = torch.Generator().manual_seed(seed)
    for weight in head.matrices():
        weight.normal_(std=_INIT_STD, generator=generator)
    head.lm_head.weight.copy_(target.output_rows(token_ids))
    if target.config.model_type not in _LIKE_LLAMA:
        return False
    final_norm = target.final_norm()
    if final_norm is not None and final_norm.shape == head.norm.weight.shape:
        head.norm.weight.copy_(final_norm)
    layer = target.last_layer()
    goals = _goals(head)
    if any(name not in layer or layer[name].shape != goal.shape for name, goal in goals.items()):
        return False
    for name, goal in goals.items():
        goal.copy_(layer[name])
    size = head.fc.weight.shape[0]
    noise = torch.randn(head.fc.weight.shape, generator=generator) * _FUSION_STD
    noise[:, -size:] += torch.eye(size)
    head.fc.weight.copy_(noise)
    return True


def _goals(head: TrainableHead) -> dict[str, Tensor]:
    """Maps the names of a Llama layer's weights to the head's parameters that they are copied to."""
    layer = head.midlayer
    size = layer.hidden_norm.weight.shape[0]
    attn = layer.self_attn
    goals = {
        f"self_attn.{name}.weight": getattr(attn, name).weight[:, size:] for name in ("q_proj", "k_proj", "v_proj")
    }
    goals |= {f"mlp.{name}.weight": getattr(layer.mlp, name).weight for name in ("gate_proj", "up_proj", "down_proj")}
    return goals | {
        "self_attn.o_proj.weight": attn.o_proj.weight,
        "input_layernorm.weight": layer.hidden_norm.weight,
        "post_attention_layernorm.weight": layer.post_attention_layernorm.weight,
    }


class ChainAttention:
    """The attention of all draft steps of one batch. Call `attend` once per step, in order."""

    def __init__(self, length: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._future = torch.full((length, length), float("-inf"), dtype=dtype, device=device).triu(1)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Computes the attention of the next step. Returns [B, heads, L, d].

        `query` is [B, heads, L, d]; `key` and `value` are [B, kv_heads, L, d].
        """
        self._keys.append(key)
        self._values.append(value)
        if len(self._keys) == 1:
            return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self._attend_chain(query)

    def _attend_chain(self, query: Tensor) -> Tensor:
        length, dim = query.shape[2:]
        # Query heads that share a KV head are stacked along the length, so that keys need not be repeated.
        grouped = query.unflatten(1, (self._keys[0].shape[1], -1))
        rows = grouped.flatten(0, 1).flatten(1, 2)
        num_shared = grouped.shape[2]
        scores = torch.baddbmm(
            self._future.repeat(num_shared, 1).unsqueeze(0),
            rows,
            self._keys[0].flatten(0, 1).transpose(1, 2),
            alpha=dim**-0.5,
        )
        own = [(grouped * key.unsqueeze(2)).sum(-1) * dim**-0.5 for key in self._keys[1:]]
        diagonals = torch.stack(own, dim=-1).flatten(0, 1).flatten(1, 2)
        weights = torch.cat([scores, diagonals], dim=-1).softmax(-1)
        output = torch.bmm(weights[..., :length], self._values[0].flatten(0, 1)).view_as(grouped)
        shares = weights[..., length:].view(*grouped.shape[:-1], len(own))
        for step, value in enumerate(self._values[1:]):
            output = output + shares[..., step : step + 1] * value.unsqueeze(2)
        return output.flatten(1, 2)
