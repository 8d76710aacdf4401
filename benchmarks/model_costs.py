"""Computes how many bytes and operations a model's forwards take, from its configuration and its weights' shapes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from safetensors import safe_open

BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """The cost of a model's forwards.

    `num_weights` counts the weights by which a decode step multiplies. `num_logit_weights` of them compute logits,
    which prefill needs only for the last token of a prompt.
    """

    num_weights: int
    num_logit_weights: int
    dtype: str
    kv_bytes_per_token: int
    attention_flops: int
    """Operations for each pair of a token and a token that it attends, over all heads and layers.

    They are the product with the key and the product with the value.
    """
    hidden_size: int
    intermediate_size: int

    @classmethod
    def of(cls, model_dir: Path, *, dtype: str, kv_bytes_per_token: int) -> Self:
        config = json.loads((model_dir / "config.json").read_text())
        num_heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
        head_dim = config.get("head_dim") or hidden_size // num_heads
        num_logit_weights = config["vocab_size"] * hidden_size
        num_weights = sum(_num_weights(path) for path in sorted(model_dir.glob("*.safetensors")))
        if not config.get("tie_word_embeddings"):  # with tied weights, the input embedding also computes the logits
            num_weights -= num_logit_weights
        return cls(
            num_weights=num_weights,
            num_logit_weights=num_logit_weights,
            dtype=dtype,
            kv_bytes_per_token=kv_bytes_per_token,
            attention_flops=4 * config["num_hidden_layers"] * num_heads * head_dim,
            hidden_size=hidden_size,
            intermediate_size=config["intermediate_size"],
        )

    def num_bytes(self, context_tokens: float) -> float:
        """Returns the bytes that a decode step reads: the weights once, and the KV of `context_tokens` in all rows
        together.
        """
        return self.num_weights * BYTES_OF_DTYPE[self.dtype] + context_tokens * self.kv_bytes_per_token

    def num_flops(self, num_rows: int, context_tokens: float) -> float:
        return 2.0 * self.num_weights * num_rows + context_tokens * self.attention_flops

    def num_prefill_flops(self, *, num_tokens: int, num_attended: int) -> float:
        """Returns the operations of a prefill of `num_tokens` tokens.

        `num_attended` is the sum, over these tokens, of the number of tokens that each attends, itself included.
        """
        num_weights = self.num_weights - self.num_logit_weights
        return 2.0 * num_weights * num_tokens + num_attended * self.attention_flops


def _num_weights(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - it is no mapping
    return sum(_product(shape) for shape in shapes)


def _product(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
