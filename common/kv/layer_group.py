"""What two services agree on about KV: the shape of a group of layers, and of a column of the speculative seed."""

from __future__ import annotations

from dataclasses import dataclass

TARGET_GROUP = "target"
DRAFT_GROUP = "draft"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LayerGroupSpec:
    """The shape of one layer group. `num_planes` is 2: keys and values. `dtype` is a key of DTYPE_BYTES."""

    name: str
    num_layers: int
    num_planes: int
    num_heads: int
    head_dim: int
    dtype: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one plane of one layer."""
        return self.num_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return self.num_planes * self.row_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in the whole group."""
        return self.num_layers * self.layer_token_bytes


@dataclass(frozen=True, slots=True)
class SeedColumnSpec:
    """One column of the speculative seed in PrebuiltBatch. `dtype` is a numpy name; `row_shape` excludes the batch."""

    name: str
    dtype: str
    row_shape: tuple[int, ...]
