"""Small host values to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int] | Sequence[float], dtype: torch.dtype, torch_device: torch.device) -> Tensor:
    """`values` as a [N] tensor on the device, ordered with the running stream.

    On CUDA the copy leaves from pinned memory, which torch keeps until the copy is done: a copy from pageable memory
    would make the caller wait for everything enqueued before it.
    """
    host = torch.tensor(values, dtype=dtype)
    if torch_device.type == "cpu":
        return host
    return host.pin_memory().to(torch_device, non_blocking=True)
