"""The CPU's attention kernel compared with the reference backend over one pool."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from baton_cpu.attention import PagedCpuAttention
from common.attention.backend import ForwardInput, LayerAttention
from common.attention.torch_attention import TorchAttention

LAYER, NUM_SLOTS, MAX_TOKENS = 1, 400, 100
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class Case:
    """Rows of the given lengths in random slots, with their query, key and value. Unused slots hold NaN."""

    def __init__(
        self, seq_lens: tuple[int, ...], *, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(len(seq_lens))

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        num_rows = len(seq_lens)
        slots = torch.randperm(NUM_SLOTS - 1, generator=generator) + 1
        table = torch.zeros((num_rows + 1, MAX_TOKENS), dtype=torch.int64)
        self.kv = torch.full((2, 2, NUM_SLOTS, kv_heads, head_dim), float("nan"), dtype=dtype)
        self.kv[:, :, 0] = 0
        start = 0
        for row, seq_len in enumerate(seq_lens, 1):
            table[row, :seq_len] = slots[start : start + seq_len]
            self.kv[:, :, table[row, : seq_len - 1]] = random(2, 2, seq_len - 1, kv_heads, head_dim)
            table[row, seq_len:] = slots[-1]  # an unused slot
            start += seq_len
        self.lens = torch.tensor(seq_lens)
        self.rows = torch.arange(num_rows, 0, -1)
        self.lens = self.lens.flip(0)
        self.table = table
        self.query, self.key, self.value = (
            random(num_rows, heads, head_dim),
            random(num_rows, kv_heads, head_dim),
            random(num_rows, kv_heads, head_dim),
        )
        self.kernel = PagedCpuAttention(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)

    def attend(self, backend: PagedCpuAttention | TorchAttention) -> tuple[Tensor, Tensor]:
        """Returns the attention output, and the pool's KV after it."""
        kv = self.kv.clone()
        batch = ForwardInput(
            input_ids=torch.zeros_like(self.lens),
            positions=self.lens - 1,
            out_cache_loc=self.table[self.rows, self.lens - 1],
            req_to_token=self.table,
            req_pool_indices=self.rows,
            seq_lens=self.lens,
            prefix_lens=None,
            extend_lens=None,
            max_seq_len=int(self.lens.max()),
            kv=kv,
            logits_rows=None,
        )
        scaling = 1 / math.sqrt(self.query.shape[-1])
        return backend.plan(batch).attend(LAYER, self.query, self.key, self.value, LayerAttention(scaling)), kv


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(4, 4, 16), (9, 3, 64), (8, 1, 20)], ids=str)
@pytest.mark.parametrize("seq_lens", [(1,), (33,), (1, 100, 17, 2)], ids=str)
def test_it_agrees_with_the_reference_and_writes_the_same_kv(
    seq_lens: tuple[int, ...], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    heads, kv_heads, head_dim = shape
    case = Case(seq_lens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    output, kv = case.attend(case.kernel)
    expected, expected_kv = case.attend(TorchAttention())
    assert output.dtype == dtype
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(output, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert torch.equal(kv.nan_to_num(7), expected_kv.nan_to_num(7))
    assert kv[LAYER].isnan().sum() < case.kv[LAYER].isnan().sum()


@pytest.mark.parametrize("plane", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
def test_a_number_that_is_none_shows_in_its_row_and_in_no_other(plane: int, poison: float) -> None:
    case = Case((40, 30, 20), heads=4, kv_heads=2, head_dim=16, dtype=torch.bfloat16)
    sound, _ = case.attend(case.kernel)
    case.kv[LAYER, plane, case.table[2, 5]] = poison
    output, _ = case.attend(case.kernel)
    entry = case.rows.tolist().index(2)
    assert not torch.isfinite(output[entry]).any(-1).all()
    others = [i for i in range(3) if i != entry]
    assert torch.equal(output[others], sound[others])


def test_strided_inputs_are_read_as_they_are_shaped() -> None:
    case = Case((9, 5), heads=4, kv_heads=2, head_dim=16, dtype=torch.float32)
    expected, expected_kv = case.attend(case.kernel)
    joined = torch.cat([case.query, case.key, case.value], dim=1)
    case.query, case.key, case.value = joined.split([4, 2, 2], dim=1)
    assert not case.query.is_contiguous()
    output, kv = case.attend(case.kernel)
    assert torch.equal(output, expected)
    assert torch.equal(kv.nan_to_num(7), expected_kv.nan_to_num(7))


@pytest.mark.parametrize("seq_len", [15, 16, 17, 33, 100])
def test_scores_may_be_far_apart_and_the_largest_anywhere(seq_len: int) -> None:
    """Softmax must subtract the largest score before it takes the exponential. Otherwise the result would be out of
    range.
    """
    case = Case((seq_len,), heads=9, kv_heads=3, head_dim=64, dtype=torch.float32)
    reference = TorchAttention()
    for place in range(seq_len - 1):
        case.kv[LAYER, 0, case.table[1, place]] = case.query[0, :3].mul(300).mean(0)
        seen, _ = case.attend(case.kernel)
        expected, _ = case.attend(reference)
        torch.testing.assert_close(seen, expected, atol=1e-4, rtol=1e-4)
        case.kv[LAYER, 0, case.table[1, place]] = -case.query[0, :3].mul(300).mean(0)
