"""Copies small values from the host to the device without waiting for it, and orders a piece's work on two devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@contextmanager
def across_devices(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Orders the work on several GPUs that the code inside launches. Use it in a piece of a stream on the first
    tensor's device.

    Work on the other tensors' GPUs runs after that stream's earlier work, and the stream waits for it at the end. Does
    nothing if all tensors are on one device.
    """
    here, *devices = dict.fromkeys(tensor.device for tensor in tensors)
    if not devices:
        yield
        return
    stream = torch.cuda.current_stream(here)
    others = [torch.cuda.current_stream(device) for device in devices]
    for other in others:
        other.wait_stream(stream)
    try:
        yield
    finally:
        for other in others:
            stream.wait_stream(other)


def upload(
    values: Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype, torch_device: torch.device
) -> Tensor:
    """Returns `values` as a tensor of the same shape on the device.

    On CUDA the copy is work of the current stream. It is made from pinned memory, which torch keeps until the copy is
    done. A copy from pageable memory would make the caller wait for everything enqueued before it.
    """
    return _upload(torch.tensor(values, dtype=dtype), torch_device)


def upload_array(values: NDArray[np.int64], torch_device: torch.device) -> Tensor:
    """Returns `values` as a tensor on the device, copied like `upload`.

    On a CPU the tensor shares the array's memory, so the array must not be written to any more.
    """
    return _upload(torch.from_numpy(values), torch_device)


def _upload(host: Tensor, torch_device: torch.device) -> Tensor:
    return host if torch_device.type == "cpu" else device_copy(host, torch_device)


def device_copy(host: Tensor, torch_device: torch.device) -> Tensor:
    """Returns a copy of `host` on the device, made as by `upload`. It never shares storage with `host`."""
    if torch_device.type == "cpu":
        return host.clone()
    with torch.cuda.device(torch_device):  # memory is pinned by the device that is current
        pinned = host.pin_memory()
    return pinned.to(torch_device, non_blocking=True)
