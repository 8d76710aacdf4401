"""Measures a machine's best rates: how fast all its cores, or its GPU, read memory and multiply matrices.

python -m benchmarks.ceilings
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton_cpu.blocks.linear import can_pack
from common.host.cores import num_cores

READ_BYTES = 1 << 29
MATRIX_SIZE = 2048
NUM_TRIES = 7
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best rates of a machine.

    `flops_per_s` is keyed by the dtype's name; a multiplication and an addition count as two operations. If the CPU
    cannot multiply bfloat16, the entry for bfloat16 is the rate of float32.
    """

    read_bytes_per_s: float
    flops_per_s: dict[str, float]
    num_threads: int

    @classmethod
    def measured(cls, device: str = "cpu") -> Ceilings:
        """Measures the rates. Each is the best of several tries, so that other work on the machine matters little."""
        num_threads = num_cores()
        torch.set_num_threads(num_threads)
        rates = {name: _flops_per_s(device, dtype) for name, dtype in DTYPES.items() if _has_kernel(device, dtype)}
        return cls(
            bandwidth_bytes_per_s(device, READ_BYTES),
            {name: rates.get(name, rates["float32"]) for name in DTYPES},
            num_threads,
        )

    def bound_s(self, *, num_bytes: float, num_flops: float, dtype: str) -> float:
        """Returns the least seconds in which `num_bytes` are read and `num_flops` are computed in `dtype`, both at the
        same time.
        """
        return max(num_bytes / self.read_bytes_per_s, num_flops / self.flops_per_s[dtype])

    def __str__(self) -> str:
        rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {name}" for name, rate in self.flops_per_s.items())
        return f"{self.num_threads} threads read {self.read_bytes_per_s / 1e9:.1f} GB/s and multiply {rates}"


def bandwidth_bytes_per_s(device: str, num_bytes: int) -> float:
    """Measures the memory bandwidth: the best of two reductions over `num_bytes` and a copy of them.

    The copy counts twice `num_bytes`, because it reads and writes them. `num_bytes` should exceed every cache.
    """
    values = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(values)
    read_s = min(_best_s(device, values.amax), _best_s(device, lambda: torch.dot(values, values)))
    return num_bytes / min(read_s, _best_s(device, lambda: target.copy_(values)) / 2)


def _has_kernel(device: str, dtype: torch.dtype) -> bool:
    """Returns whether PyTorch multiplies matrices of `dtype` by an optimised kernel on this device."""
    return device != "cpu" or can_pack(torch.ones((2, 2), dtype=dtype))


def _flops_per_s(device: str, dtype: torch.dtype) -> float:
    matrix = torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device).to(dtype)
    return 2 * MATRIX_SIZE**3 / _best_s(device, lambda: matrix @ matrix)


def _best_s(device: str, work: Callable[[], object]) -> float:
    return min(_seconds(device, work) for _ in range(NUM_TRIES))


def _seconds(device: str, work: Callable[[], object]) -> float:
    _finish(device)
    start_s = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - start_s


def _finish(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(Ceilings.measured("cuda" if torch.cuda.is_available() else "cpu"))
