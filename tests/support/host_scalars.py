"""Finds assignments that copy a number from the host to a GPU and so make the caller wait for the GPU's stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RefuseHostScalars(TorchDispatchMode):
    """While active, raises AssertionError where a tensor is assigned a Python number, as in `table[indices] = number`.

    PyTorch copies that number to the GPU from pageable memory, and so waits for the stream. The check also works on a
    CPU, where the assignment costs nothing.
    """

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if operator is torch.ops.aten.index_put_.default:
            assert args[2].dim() > 0, "a number from the host is put into a table"
        return operator(*args, **(kwargs or {}))
