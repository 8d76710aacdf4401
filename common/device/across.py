"""Orders work that one piece of a stream does on several devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def across_devices(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Orders the work on several GPUs that the code inside launches. Call it in a piece of a stream of the device that
    the first tensor is on.

    The work on the GPUs of the other tensors comes after what the present stream does before, and the stream waits for
    it at the end. Does nothing if all tensors are on one device.
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
