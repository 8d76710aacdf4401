"""Tests without a GPU of the host memory through which CudaDevice stages its copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.device.cuda import CudaDevice


class HostOnly(CudaDevice):
    """A CudaDevice whose copies stay on the host, in memory that is not pinned. `staged` lists the buffers through
    which they went.
    """

    def __init__(self) -> None:
        self._torch_device = torch.device("cpu")
        self.staged: list[Tensor] = []

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.staged.append(torch.empty(tuple(shape), dtype=dtype))
        return self.staged[-1]


def test_of_a_large_pool_only_what_lands_is_staged() -> None:
    device = HostOnly()
    pool = torch.arange(3 * 2 * 1000 * 4, dtype=torch.int32).view(3, 2, 1000, 4)
    landing = pool[1:, :, 500:507]
    there = device.to_device(landing)
    (staged,) = device.staged
    assert staged.untyped_storage().nbytes() == landing.nbytes
    assert staged.is_contiguous() and torch.equal(there, landing)
