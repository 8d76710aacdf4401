"""What would make a GPU's stream wait although nobody reads anything back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class RefuseHostScalars(TorchDispatchMode):
    """`table[places] = number` sends the number as a tensor of its own, from memory that the copy makes the caller wait
    for. AssertionError, on a CPU too, where it costs nothing.
    """

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if operator is torch.ops.aten.index_put_.default:
            assert args[2].dim() > 0, "a number from the host is put into a table"
        return operator(*args, **(kwargs or {}))
