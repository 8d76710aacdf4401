"""Draft heads in plain torch: dense causal attention over lists of keys and values, without paging or shared code.

They are written from the formats' descriptions, and read the saved weights by name.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu

from tests.support.head_parts import Tensors, load_head, mtp_names, mtp_prefixes


class _Layer:
    """A decoder layer, with the keys and values it has computed so far."""

    def __init__(self, tensors: Tensors, prefix: str, config: dict[str, Any], mlp_norm: str) -> None:
        self._weights = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        self._config = config
        self._mlp_norm = mlp_norm
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self._weights[f"{name}.weight"].T + self._weights.get(f"{name}.bias", torch.tensor(0.0))

    def __call__(self, x: Tensor, residual: Tensor, position: int) -> Tensor:
        """Computes one token from the layer's input x [inputs] and the residual [h]."""
        head_dim = self._config["head_dim"]
        query, key, value = (self.linear(f"self_attn.{name}_proj", x).view(-1, head_dim) for name in ("q", "k", "v"))
        self.keys.append(_rotate(key, position, self._config["rope_theta"]))
        self.values.append(value)
        query = _rotate(query, position, self._config["rope_theta"])
        num_shared = query.shape[0] // key.shape[0]
        keys, values = (
            torch.stack(tokens, dim=1).repeat_interleave(num_shared, dim=0) for tokens in (self.keys, self.values)
        )
        weights = torch.softmax((keys @ query.unsqueeze(-1)).squeeze(-1) / math.sqrt(head_dim), dim=-1)
        attended = (weights.unsqueeze(1) @ values).flatten()
        residual = residual + self.linear("self_attn.o_proj", attended)
        x = norm(residual, self._weights[f"{self._mlp_norm}.weight"], self._config)
        wide = silu(self.linear("mlp.gate_proj", x)) * self.linear("mlp.up_proj", x)
        return residual + self.linear("mlp.down_proj", wide)


def norm(x: Tensor, weight: Tensor, config: dict[str, Any]) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()


def _rotate(heads: Tensor, position: int, theta: float) -> Tensor:
    half = heads.shape[-1] // 2
    angles = position * theta ** -(torch.arange(half, dtype=torch.float64) / half)
    turns = torch.polar(torch.ones_like(angles), angles)
    turned = torch.complex(heads[:, :half].double(), heads[:, half:].double()) * turns
    return torch.cat([turned.real, turned.imag], dim=-1).to(heads.dtype)


class ReferenceHead:
    """The base class of the reference heads. A head runs one row, takes missing weights from the target in
    `target_dir`, and counts positions from `first_position` in each layer.
    """

    def __init__(self, directory: Path, target_dir: Path, *, first_position: int = 0) -> None:
        config, self.tensors = load_head(directory)
        self.config = {**config, **config.get("transformer_layer_config", {})}
        self._target = load_file(target_dir / "model.safetensors")
        self._position = first_position
        prefixes, mlp_norm = self._layout(target_dir)
        self.prefixes = prefixes
        self.layers = [_Layer(self.tensors, prefix, self.config, mlp_norm) for prefix in prefixes]

    def fuse(self, captured: Tensor) -> Tensor:
        """Fuses captured target states [T, states * H] into hidden states [T, h]."""
        raise NotImplementedError

    def forward(self, token_id: int, hidden: Tensor, layer: int = 0) -> Tensor:
        """Computes one token from its id and its `hidden` state [h]. Returns the output [h]."""
        raise NotImplementedError

    def logits(self, hidden: Tensor, layer: int = 0) -> Tensor:
        raise NotImplementedError

    def extend(self, ids: list[int], hidden: Tensor, layer: int = 0) -> Tensor:
        return torch.stack([self.forward(token, state, layer) for token, state in zip(ids, hidden, strict=True)])

    def kv(self, layer: int = 0) -> Tensor:
        """Returns the keys and values so far, [2, tokens, heads, head_dim]."""
        return torch.stack([torch.stack(self.layers[layer].keys), torch.stack(self.layers[layer].values)])

    def _layout(self, target_dir: Path) -> tuple[list[str], str]:
        raise NotImplementedError

    def _next_position(self, layer: int) -> int:
        return self._position + len(self.layers[layer].keys)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.tensors[f"{name}.weight"], self.config)

    def _embedding(self, token_id: int, prefix: str = "") -> Tensor:
        own = self.tensors.get(f"{prefix}embed_tokens.weight")
        return (self._target["model.embed_tokens.weight"] if own is None else own)[token_id]

    def _target_head(self, x: Tensor) -> Tensor:
        """Returns x multiplied by the target's output layer. In the tiny Llama that is tied to the embedding."""
        return x @ self._target.get("lm_head.weight", self._target["model.embed_tokens.weight"]).T


class ReferenceEagle3(ReferenceHead):
    def _layout(self, target_dir: Path) -> tuple[list[str], str]:
        is_mid = any(name.startswith("midlayer.") for name in self.tensors)
        return ["midlayer." if is_mid else "layers.0."], "post_attention_layernorm"

    def fuse(self, captured: Tensor) -> Tensor:
        if self.config["norm_before_fc"]:
            captured = self._norm(captured, "input_norm")
        if self.config["fc_norm"]:
            width = self.config["target_hidden_size"]
            states = captured.split(width, dim=-1)
            captured = torch.cat([self._norm(state, f"fc_norm.{i}") for i, state in enumerate(states)], dim=-1)
        return captured @ self.tensors["fc.weight"].T + self.tensors.get("fc.bias", torch.tensor(0.0))

    def forward(self, token_id: int, hidden: Tensor, layer: int = 0) -> Tensor:
        prefix = self.prefixes[0]
        normed = self._norm(hidden, f"{prefix}hidden_norm")
        x = torch.cat([self._norm(self._embedding(token_id), f"{prefix}input_layernorm"), normed])
        residual = normed if self.config["norm_before_residual"] else hidden
        output = self.layers[0](x, residual, self._next_position(0))
        return self._norm(output, "norm") if self.config["norm_output"] else output

    def logits(self, hidden: Tensor, layer: int = 0) -> Tensor:
        if not self.config["norm_output"]:
            hidden = self._norm(hidden, "norm")
        if "lm_head.weight" in self.tensors:
            return hidden @ self.tensors["lm_head.weight"].T
        if self.config["tie_word_embeddings"]:
            return hidden @ self.tensors["embed_tokens.weight"].T
        return self._target_head(hidden)


class ReferenceEagle1(ReferenceHead):
    def _layout(self, target_dir: Path) -> tuple[list[str], str]:
        return ["layers.0."], "post_attention_layernorm"

    def fuse(self, captured: Tensor) -> Tensor:
        return captured

    def forward(self, token_id: int, hidden: Tensor, layer: int = 0) -> Tensor:
        both = torch.cat([self._embedding(token_id), hidden])
        x = self.tensors["fc.weight"] @ both + self.tensors.get("fc.bias", torch.tensor(0.0))
        return self.layers[0](x, x, self._next_position(0))

    def logits(self, hidden: Tensor, layer: int = 0) -> Tensor:
        return self._target_head(hidden)


class ReferenceMtp(ReferenceHead):
    def _layout(self, target_dir: Path) -> tuple[list[str], str]:
        self._kind = "nextn"
        if any(name.startswith("model.mtp") for name in self.tensors):
            self._kind = "mimo" if any("mtp_layers" in name for name in self.tensors) else "mimo_v2"
        is_step = any(".transformer.shared_head" in name for name in self.tensors)
        self._names = mtp_names(self._kind, step_spelling=is_step)  # type: ignore[arg-type]
        num_layers = self.config["num_nextn_predict_layers"]
        return mtp_prefixes(target_dir, self._kind, num_layers), self._names["mlp_norm"]  # type: ignore[arg-type]

    def fuse(self, captured: Tensor) -> Tensor:
        return captured

    def forward(self, token_id: int, hidden: Tensor, layer: int = 0) -> Tensor:
        prefix, names = self.prefixes[layer], self._names
        embedding = self._norm(self._embedding(token_id, prefix), prefix + names["embedding_norm"])
        hidden = self._norm(hidden, prefix + names["hidden_norm"])
        both = [hidden, embedding] if self._kind == "mimo" else [embedding, hidden]
        x = self.tensors[f"{prefix}{names['fusion']}.weight"] @ torch.cat(both)
        output = self.layers[layer](self._norm(x, prefix + names["input_norm"]), x, self._next_position(layer))
        return self._norm(output, prefix + names["output_norm"]) if self._kind == "mimo" else output

    def logits(self, hidden: Tensor, layer: int = 0) -> Tensor:
        prefix, names = self.prefixes[layer], self._names
        if self._kind != "mimo":
            hidden = self._norm(hidden, prefix + names["output_norm"])
        own = self.tensors.get(f"{prefix}{names['output_head']}.weight")
        return self._target_head(hidden) if own is None else hidden @ own.T
