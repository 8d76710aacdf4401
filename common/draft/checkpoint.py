"""The tensors of a draft head's checkpoint, checked so that none is missing, unused or of a wrong shape."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from common.errors import DraftMismatch

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INTEGER_DTYPES = (torch.int64, torch.int32, torch.bool, torch.uint8)
_WITHOUT_MEANING = "rotary_emb.inv_freq"  # in old checkpoints; it follows from the config


class Checkpoint:
    """The tensors of a draft head by name. Each can be taken once; `finish` checks that all were taken.

    Weights are returned in `dtype` on `device`, integers as int64. `kind` names the head's format in errors.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        directory: str,
        kind: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(_WITHOUT_MEANING)}
        self._directory = directory
        self.kind = kind
        self._dtype = dtype
        self._device = device

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def untaken(self) -> Checkpoint:
        """Returns a copy with the tensors that were not taken yet. Taking from one does not affect the other."""
        return Checkpoint(
            self._tensors, directory=self._directory, kind=self.kind, dtype=self._dtype, device=self._device
        )

    @property
    def num_bytes(self) -> int:
        """The bytes, in `dtype`, of the tensors that were not taken yet."""
        return sum(tensor.numel() for tensor in self._tensors.values()) * self._dtype.itemsize

    def has_prefix(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._tensors)

    def take(self, name: str, *shape: int) -> Tensor:
        """Returns the weights `name`. Raises DraftMismatch if they are missing, not finite, or of another shape."""
        weights = self._take(name, shape, _WEIGHT_DTYPES).to(self._device, self._dtype)
        if not torch.isfinite(weights).all():
            raise self.mismatch(f"{name} has NaN or infinite numbers in {self._dtype}")
        return weights

    def take_if_there(self, name: str, *shape: int) -> Tensor | None:
        """Returns the weights `name` like `take`, or None if there are none."""
        return self.take(name, *shape) if name in self else None

    def take_integers(self, name: str, *shape: int) -> Tensor:
        """Returns the integers or booleans `name` as int64. Raises DraftMismatch like `take`."""
        return self._take(name, shape, _INTEGER_DTYPES).to(self._device, torch.int64)

    def finish(self) -> None:
        """Raises DraftMismatch if there are tensors that were not taken."""
        if self._tensors:
            left = sorted(self._tensors)
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise self.mismatch(f"not known in {self.kind}: {', '.join(left[:3])}{more}")

    def mismatch(self, message: str) -> DraftMismatch:
        """Returns an error about this checkpoint, to be raised."""
        return DraftMismatch(f"{self._directory}: {message}")

    def _take(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise self.mismatch(f"{name} is missing, which {self.kind} needs")
        if tuple(tensor.shape) != shape:
            raise self.mismatch(f"{name} is {list(tensor.shape)}, which in {self.kind} of this config is {list(shape)}")
        if tensor.dtype not in dtypes:
            raise self.mismatch(f"{name} is of {tensor.dtype}")
        return tensor
