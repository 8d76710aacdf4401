"""Tests of attention over drafts: a mask says to which of a row's last tokens each new token attends. All backends
share this contract.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from baton_cpu.attention import PagedCpuAttention
from common.attention.backend import AttentionBackend, ForwardInput, LayerAttention
from common.attention.torch_attention import TorchAttention
from common.attention.triton_attention import HeadShape, TritonAttention

LAYER, NUM_SLOTS, MAX_TOKENS = 1, 300, 80
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
BACKENDS = [
    *((name, dtype) for name in ("torch", "paged") for dtype in (torch.float32, torch.bfloat16)),
    *(("triton", dtype) for dtype in TOLERANCES),
]
SHAPES = {
    "a tree behind prefixes, and behind none": (5, 5, (0, 7, 1, 30)),
    "a level of a tree behind earlier ones": (3, 9, (6, 20, 41)),
    "one token of each row behind earlier ones": (1, 4, (3, 12)),
    "more queries than the kernel takes": (33, 33, (0, 11)),
}
"""Cases by name: (new tokens of each row, number of its last tokens that the mask covers, earlier tokens of each
row).
"""


def backend_of(name: str, dtype: torch.dtype) -> AttentionBackend:
    if name == "torch":
        return TorchAttention()
    if name == "triton":
        return TritonAttention(HeadShape(HEADS, KV_HEADS, HEAD_DIM, dtype))
    return PagedCpuAttention(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """The input of a forward whose rows have slots in random places. Unused slots hold NaN."""

    batch: ForwardInput
    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def of(cls, shape: str, dtype: torch.dtype) -> Case:
        num_new, num_masked, prefix_lens = SHAPES[shape]
        generator = torch.Generator().manual_seed(num_new)
        num_rows = len(prefix_lens)
        num_tokens = num_rows * num_new

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        free = torch.randperm(NUM_SLOTS - 1, generator=generator) + 1
        rows = torch.randperm(num_rows, generator=generator) + 1
        table = torch.full((num_rows + 1, MAX_TOKENS), int(free[-1]))  # an unused slot
        kv = torch.full((2, 2, NUM_SLOTS, KV_HEADS, HEAD_DIM), float("nan"), dtype=dtype)
        kv[:, :, 0] = 0
        out_cache_loc = []
        for row, prefix_len in zip(rows.tolist(), prefix_lens, strict=True):
            slots, free = free[: prefix_len + num_new], free[prefix_len + num_new :]
            table[row, : slots.numel()] = slots
            kv[:, :, slots[:prefix_len]] = random(2, 2, prefix_len, KV_HEADS, HEAD_DIM)
            out_cache_loc.append(slots[prefix_len:])
        mask = torch.rand((num_tokens, num_masked), generator=generator) < 0.5
        itself = torch.arange(num_masked - num_new, num_masked).repeat(num_rows)
        mask[torch.arange(num_tokens), itself] = True
        lens = torch.tensor(prefix_lens) + num_new
        batch = ForwardInput(
            input_ids=torch.zeros(num_tokens, dtype=torch.int64),
            positions=torch.zeros(num_tokens, dtype=torch.int64),
            out_cache_loc=torch.cat(out_cache_loc),
            req_to_token=table,
            req_pool_indices=rows,
            seq_lens=lens,
            prefix_lens=prefix_lens,
            extend_lens=(num_new,) * num_rows,
            max_seq_len=int(lens.max()) + 3,
            kv=kv,
            logits_rows=None,
            tree_mask=mask,
        )
        return cls(batch, *(random(num_tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)))

    def attend(self, backend: AttentionBackend, tree_mask: Tensor | None) -> Tensor:
        batch = replace(self.batch, kv=self.batch.kv.clone(), tree_mask=tree_mask)
        return backend.plan(batch).attend(
            LAYER, self.query, self.key, self.value, LayerAttention(1 / math.sqrt(HEAD_DIM))
        )


def masked_softmax(case: Case) -> Tensor:
    """Returns the expected output [T, heads, head_dim] in float64, computed token by token and head by head."""
    batch, mask = case.batch, case.batch.tree_mask
    assert mask is not None and batch.extend_lens is not None
    kv = batch.kv[LAYER].double()
    kv[0, batch.out_cache_loc], kv[1, batch.out_cache_loc] = case.key.double(), case.value.double()
    output = torch.empty(case.query.shape, dtype=torch.float64)
    num_new = batch.extend_lens[0]
    for token in range(output.shape[0]):
        entry = token // num_new
        slots = batch.req_to_token[batch.req_pool_indices[entry], : batch.seq_lens[entry]]
        before = torch.ones(slots.numel() - mask.shape[1], dtype=torch.bool)
        attended = slots[torch.cat([before, mask[token]])]
        for head in range(HEADS):
            keys, values = (kv[plane, attended, head // (HEADS // KV_HEADS)] for plane in (0, 1))
            scores = keys @ case.query[token, head].double() / math.sqrt(HEAD_DIM)
            output[token, head] = scores.softmax(dim=0) @ values
    return output


def check_a_mask_says_what_is_attended(backend: AttentionBackend, case: Case) -> None:
    output, tolerance = case.attend(backend, case.batch.tree_mask), TOLERANCES[case.query.dtype]
    assert output.dtype == case.query.dtype
    torch.testing.assert_close(output.double(), masked_softmax(case), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_mask_says_what_is_attended(shape: str, backend: str, dtype: torch.dtype) -> None:
    check_a_mask_says_what_is_attended(backend_of(backend, dtype), Case.of(shape, dtype))


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_chain_given_as_a_mask_is_no_mask(shape: str, backend: str, dtype: torch.dtype) -> None:
    num_new, num_masked, prefix_lens = SHAPES[shape]
    case = Case.of(shape, dtype)
    chain = torch.ones((num_new, num_masked), dtype=torch.bool).tril(num_masked - num_new)
    output = case.attend(backend_of(backend, dtype), chain.repeat(len(prefix_lens), 1))
    expected = case.attend(backend_of(backend, dtype), None)
    torch.testing.assert_close(output, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("column", ["out_cache_loc", "req_pool_indices", "seq_lens"])
@pytest.mark.parametrize("backend", ["torch", "paged", "triton"])
def test_a_column_may_be_one_of_something_wider(backend: str, column: str) -> None:
    """The column is not contiguous, like the slots of one draft of a step, which are a column of a table."""
    case = Case.of("a level of a tree behind earlier ones", torch.float32)
    narrow = getattr(case.batch, column)
    wide = torch.stack([narrow, torch.zeros_like(narrow)], dim=1)[:, 0]
    assert not wide.is_contiguous()
    check_a_mask_says_what_is_attended(
        backend_of(backend, torch.float32), replace(case, batch=replace(case.batch, **{column: wide}))
    )


@dataclass(frozen=True, slots=True)
class Broken:
    """A wrong backend: it computes with its masks changed in the way `how`."""

    backend: AttentionBackend
    how: str

    def plan(self, batch: ForwardInput) -> object:
        mask = batch.tree_mask
        assert mask is not None
        if self.how == "ignored":
            return self.backend.plan(replace(batch, tree_mask=None))
        if self.how == "another row's":
            return self.backend.plan(replace(batch, tree_mask=mask.roll(mask.shape[0] // len(batch.seq_lens), 0)))
        return self.backend.plan(replace(batch, tree_mask=mask.roll(1, 1)))


@pytest.mark.parametrize("how", ["ignored", "another row's", "a column late"])
@pytest.mark.parametrize("backend", ["torch", "paged", "triton"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if "one token" not in shape])
def test_it_is_seen_when_masks_are(how: str, backend: str, shape: str) -> None:
    broken = Broken(backend_of(backend, torch.float32), how)
    with pytest.raises(AssertionError, match="not close"):
        check_a_mask_says_what_is_attended(broken, Case.of(shape, torch.float32))  # type: ignore[arg-type]
