"""Tests of the number formats that kernels read and write, and of their exponential function."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton_cpu.compiler.jit import Kernel, exp, jit
from baton_cpu.compiler.numbers import number_format, read, rounded_as_torch

HALVES = [torch.bfloat16, torch.float16]


@jit
def rounded_number(number, like):  # type: ignore[no-untyped-def]
    return rounded_as_torch(number, like)


@jit
def read_element(element, _like):  # type: ignore[no-untyped-def]
    return read(element)


@jit
def power(number, _like):  # type: ignore[no-untyped-def]
    return exp(number)


def converted(convert: Kernel, source: np.ndarray, target: np.ndarray) -> torch.Tensor:
    """Returns `target` after a kernel has stored `convert(element, target)` for every element of `source`."""

    @jit
    def convert_all(source, target):  # type: ignore[no-untyped-def]
        for i in range(source.shape[0]):
            target[i] = convert(source[i], target)

    convert_all(source, target)
    return torch.from_numpy(target)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_number_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    numbers = number_format(dtype)
    seen = converted(read_element, numbers.array(every), np.zeros(1 << 16, np.float32))
    torch.testing.assert_close(seen, every.float(), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    """The numbers include all exponents, ties in both directions, denormals, and infinities and NaN of both signs."""
    bits = torch.randint(-(1 << 31), 1 << 31, (100_000,), generator=torch.Generator().manual_seed(3))
    ties = (torch.arange(0, 1 << 16, dtype=torch.int64) << 16) + (1 << 15) - (1 << 31)
    floats = torch.cat([bits, ties, ties + 1, ties - 1]).clamp(-(1 << 31), (1 << 31) - 1).to(torch.int32)
    numbers = number_format(dtype)
    target = np.zeros(floats.shape[0], numbers.numpy_dtype)
    seen = converted(rounded_number, floats.view(torch.float32).numpy(), target).view(dtype)
    expected = floats.view(torch.float32).to(dtype)
    assert torch.equal(seen.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(seen[kept].view(torch.uint8), expected[kept].view(torch.uint8))


def test_exp_is_a_float32s_for_numbers_up_to_zero() -> None:
    numbers = torch.cat([torch.linspace(-87, 0, 200_000), torch.linspace(-1e-3, 0, 1000), torch.tensor([-1e-30, -0.0])])
    seen = converted(power, numbers.numpy(), np.zeros(numbers.shape[0], np.float32))
    expected = numbers.double().exp()
    # The product with ln 2 is rounded before the subtraction: the error grows with the number.
    allowed = 2e-7 + 1e-7 * numbers.abs()
    assert bool(((seen.double() - expected).abs() <= allowed * expected).all())
    assert float(seen[numbers == 0].min()) == 1.0


def test_exp_of_what_is_no_number_or_too_small() -> None:
    edge = torch.tensor([float("nan"), -float("inf"), -87.5, -1e30, -0.0] * 8)  # enough of them for vector code
    seen = converted(power, edge.numpy(), np.ones(40, np.float32)).view(8, 5)
    assert bool(seen[:, 0].isnan().all())
    assert torch.equal(seen[:, 1:4], torch.zeros(8, 3))
    assert torch.equal(seen[:, 4], torch.ones(8))
