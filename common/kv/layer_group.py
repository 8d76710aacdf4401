"""Shapes that both services must agree on: those of a layer group's KV and of the draft seed's columns."""

from __future__ import annotations

from dataclasses import dataclass

TARGET_GROUP = "target"
DRAFT_GROUP = "draft"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LayerGroupSpec:
    """The shape of the KV of one layer group: all layers of the target model, or all of the draft head.

    `num_planes` is 2: keys and values. `dtype` is a key of DTYPE_BYTES.
    """

    name: str
    num_layers: int
    num_planes: int
    num_heads: int
    head_dim: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys, or of its values, in one layer."""
        return self.num_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token's KV in one layer."""
        return self.num_planes * self.row_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV in all layers of the group."""
        return self.num_layers * self.layer_token_bytes


@dataclass(frozen=True, slots=True)
class SeedColumnSpec:
    """The name and shape of one column of the draft seed, the data with which drafting starts for each row.

    `dtype` is the name of a numpy dtype, or "bfloat16". `row_shape` is the shape without the batch dimension.
    """

    name: str
    dtype: str
    row_shape: tuple[int, ...]
