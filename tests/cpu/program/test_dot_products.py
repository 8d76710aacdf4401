"""Tests that dot products with a weight panel give the same sums with either register size, and in bfloat16 also
computed in two halves.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_cpu.compiler.numbers import has_bfloat16
from baton_cpu.program import weights
from baton_cpu.program.kernel.dot_products import MAX_ROWS, PANEL_WIDTH, panel_products, products_of
from baton_cpu.program.kernel.numbers import input_dtype
from baton_cpu.program.weights import WeightMemory, packed, step_of

_BITS = {torch.bfloat16: np.uint16, torch.float32: np.float32}
_WIDTHS = (2, 6, 64, 190)
_GUARD = np.float32(12345)


def compiled(max_whole_rows: int) -> Any:
    products = products_of(MAX_ROWS, max_whole_rows, multiplies_pairs=False)

    def call(*arguments):  # type: ignore[no-untyped-def]
        products(*arguments)

    return numba.njit(call)


WHOLE, HALVES = compiled(MAX_ROWS), compiled(0)


def run(products: Any, panel: Tensor, x: Tensor) -> NDArray[np.float32]:
    """Computes the products by the kernel and returns them, [rows, PANEL_WIDTH]. Asserts that memory after the output
    stays unchanged.
    """
    num_rows = x.shape[0]
    out = np.full((num_rows + 1) * PANEL_WIDTH, _GUARD)
    num_steps = panel.shape[0]
    like = np.zeros(1, _BITS[panel.dtype])
    stride = x.stride(0) * x.itemsize
    products(panel.data_ptr(), x.data_ptr(), stride, num_steps, num_rows, out.ctypes.data, like)
    assert (out[num_rows * PANEL_WIDTH :] == _GUARD).all()
    return out.reshape(num_rows + 1, PANEL_WIDTH)[:num_rows]


def panel_and_rows(width: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a weight panel and `num_rows` strided rows, both of `dtype`, and the expected products in float64."""
    generator = torch.Generator().manual_seed(width * 10 + num_rows)
    weight = torch.randn((PANEL_WIDTH, width), generator=generator).to(dtype)
    x = torch.randn((num_rows, width + 5), generator=generator).to(dtype)[:, :width]
    (panel,) = packed(weight, WeightMemory(), lambda: None)
    return panel, x, x.double() @ weight.double().T


@pytest.mark.parametrize("dtype", list(_BITS), ids=str)
@pytest.mark.parametrize("width", _WIDTHS)
def test_each_number_of_rows_in_passes_of_whole_steps_or_of_halves_gives_the_same_sums(
    width: int, dtype: torch.dtype
) -> None:
    for num_rows in range(1, MAX_ROWS + 1):
        panel, x, expected = panel_and_rows(width, num_rows, dtype)
        seen = run(WHOLE, panel, x.float())
        torch.testing.assert_close(torch.from_numpy(seen).double(), expected, atol=1e-4, rtol=1e-4)
        assert np.array_equal(run(HALVES, panel, x.float()), seen)


@pytest.mark.parametrize("dtype", list(_BITS), ids=str)
def test_a_weight_is_packed_in_parts_of_whole_panels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last panel is not full. `check` is called before each part, so that packing can be stopped."""
    weight = torch.randn((7 * PANEL_WIDTH + 3, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
    at_once, checks = packed(weight, WeightMemory(), lambda: None), list[None]()
    monkeypatch.setattr(weights, "PART_BYTES", 3 * PANEL_WIDTH * 6 * dtype.itemsize)
    assert torch.equal(packed(weight, WeightMemory(), lambda: checks.append(None)), at_once)
    assert len(checks) == 3 and at_once.count_nonzero() == weight.count_nonzero()
    outputs = at_once.transpose(1, 2).flatten(0, 1).flatten(1)
    assert torch.equal(outputs[: len(weight)], weight)


@pytest.mark.parametrize("dtype", list(_BITS), ids=str)
def test_this_cpu_s_products_are_those_and_a_row_s_do_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    panel, x, expected = panel_and_rows(190, MAX_ROWS, dtype)
    x = x.to(input_dtype(dtype))
    together = run(panel_products, panel, x)
    torch.testing.assert_close(torch.from_numpy(together).double(), expected, atol=1e-3, rtol=1e-3)
    for row in range(MAX_ROWS):
        alone = run(panel_products, panel, x[row : row + 1])
        assert np.array_equal(alone[0], together[row])


def test_inputs_are_bfloat16_only_where_the_cpu_multiplies_it() -> None:
    assert step_of(torch.bfloat16) == 2
    assert input_dtype(torch.bfloat16) == (torch.bfloat16 if has_bfloat16() else torch.float32)
    assert input_dtype(torch.float32) == torch.float32
