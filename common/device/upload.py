"""Small host values to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(
    values: Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype, torch_device: torch.device
) -> Tensor:
    """`values` as a tensor of their shape on the device, ordered with the running stream.

    On CUDA the copy leaves from pinned memory, which torch keeps until the copy is done: a copy from pageable memory
    would make the caller wait for everything enqueued before it.
    """
    return _upload(torch.tensor(values, dtype=dtype), torch_device)


def upload_array(values: NDArray[np.int64], torch_device: torch.device) -> Tensor:
    """The same of an array that nobody writes to any more, which a CPU's tensor shares."""
    return _upload(torch.from_numpy(values), torch_device)


def _upload(host: Tensor, torch_device: torch.device) -> Tensor:
    return host if torch_device.type == "cpu" else device_copy(host, torch_device)


def device_copy(host: Tensor, torch_device: torch.device) -> Tensor:
    """`host` on the device, never sharing storage with it; else as `upload`."""
    if torch_device.type == "cpu":
        return host.clone()
    with torch.cuda.device(torch_device):  # memory is pinned by the device that is current
        pinned = host.pin_memory()
    return pinned.to(torch_device, non_blocking=True)
