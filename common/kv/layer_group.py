"""Shapes that both services must agree on: those of a layer group's KV and of the draft seed's columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

TARGET_GROUP = "target"
DRAFT_GROUP = "draft"
KV_FP8 = "float8_e4m3fn"
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, KV_FP8: 1}


@dataclass(frozen=True, slots=True)
class LayerGroupSpec:
    """The shape of the KV of one layer group: the target model's layers that attend alike, or all of the draft head's.

    `num_planes` is 2: keys and values. `dtype` is a key of DTYPE_BYTES; the pool stores the bits of KV_FP8 as uint8.
    With `window` each token attends only the last `window` tokens, itself among them, and the group has slots of its
    own for them (see WindowSlots). With None it attends all earlier tokens, and the group's slots are the pool's.
    """

    name: str
    num_layers: int
    num_planes: int
    num_heads: int
    head_dim: int
    dtype: str
    window: int | None = None

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


def num_kept_before(groups: Iterable[LayerGroupSpec]) -> int:
    """Returns how many tokens before a window are kept, given the groups of a pool.

    A cached prefix may end one token before the prompt's end, or with a draft head as many as the head has layers.
    """
    return max((group.num_layers for group in groups if group.name == DRAFT_GROUP), default=1)


@dataclass(frozen=True, slots=True)
class WindowLayers:
    """The layers of a target model that attend the same window, in ascending order. They are one group."""

    group: LayerGroupSpec
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SeedColumnSpec:
    """The name and shape of one column of the draft seed, the data with which drafting starts for each row.

    `dtype` is the name of a numpy dtype, or "bfloat16". `row_shape` is the shape without the batch dimension.
    """

    name: str
    dtype: str
    row_shape: tuple[int, ...]
