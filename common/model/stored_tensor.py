"""A tensor of a weight file, as the file's header describes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

WEIGHT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types of plain weights, by the names that safetensors has for them."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's file, and the shape and type in the file's header. `dtype` is safetensors' name, such as BF16."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def place(self) -> str:
        """The names of the model directory and the file, for errors."""
        return f"{self.file.parent.name}/{self.file.name}"
