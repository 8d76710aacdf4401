"""Compares the GPU's attention kernels with the reference backend on a device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.attention.backend import LayerAttention
from common.attention.fp8_kv import to_fp8
from common.attention.torch_attention import TorchAttention
from tests.model.attention_rows import Rows

pytestmark = pytest.mark.gpu
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
ROWS = {
    "decode": ((0, 1), (32, 1), (99, 1), (1000, 1)),
    "verify": ((0, 5), (130, 5), (963, 5)),
    "prompts of any length behind any prefix": ((0, 140), (7, 1), (700, 333), (1, 2)),
}
HEADS = [((4, 4), 64), ((6, 2), 80), ((4, 1), 96), ((14, 2), 128), ((32, 8), 128), ((4, 2), 256)]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), HEADS, ids=str)
@pytest.mark.parametrize("lens", ROWS)
def test_it_agrees_with_the_reference_and_writes_the_same_kv(
    lens: str, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    rows = Rows.of(ROWS[lens], heads=heads, head_dim=head_dim, dtype=dtype, device="cuda")
    rows.check(rows.attend(rows.triton()), rows.attend(TorchAttention()), TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_masked", [5, 9])
def test_drafts_attend_what_their_masks_say(num_masked: int, dtype: torch.dtype) -> None:
    rows = Rows.of(((6, 5), (400, 5), (63, 5)), heads=(14, 2), head_dim=128, dtype=dtype, device="cuda")
    rows = rows.with_drafts(num_masked)
    rows.check(rows.attend(rows.triton()), rows.attend(TorchAttention()), TOLERANCES[dtype])


LAYERS = {
    "a window": LayerAttention(0.1, window=100),
    "a window of many parts": LayerAttention(0.1, window=700),
    "a soft cap": LayerAttention(0.1, softcap=3.0),
    "sinks": LayerAttention(0.1, sinks=torch.arange(14.0)),
    "all of them": LayerAttention(0.1, window=300, softcap=20.0, sinks=torch.arange(14.0)),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_masked", [0, 9])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("lens", ROWS)
def test_a_layer_says_how_tokens_attend(lens: str, layer: str, num_masked: int, dtype: torch.dtype) -> None:
    rows = Rows.of(ROWS[lens], heads=(14, 2), head_dim=64, dtype=dtype, device="cuda")
    how = LAYERS[layer]
    if how.sinks is not None:
        how = replace(how, sinks=how.sinks.cuda())
    if num_masked:
        rows = rows.with_drafts(num_masked) if lens == "verify" else rows
    rows.check(rows.attend(rows.triton(), how), rows.attend(TorchAttention(), how), TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_masked", [0, 9])
@pytest.mark.parametrize("lens", ROWS)
def test_kv_may_be_in_fp8(lens: str, num_masked: int, dtype: torch.dtype) -> None:
    rows = Rows.of(ROWS[lens], heads=(14, 2), head_dim=64, dtype=dtype, device="cuda")
    rows = rows.with_drafts(num_masked) if num_masked and lens == "verify" else rows
    (output, kv), (expected, expected_kv) = (
        rows.with_kv(to_fp8).attend(backend) for backend in (rows.triton(), TorchAttention())
    )
    torch.testing.assert_close(output, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
    assert torch.equal(kv, expected_kv) and not torch.equal(kv, rows.with_kv(to_fp8).batch.kv)


def test_nothing_waits_for_the_device() -> None:
    for lens in ROWS.values():
        rows = Rows.of(lens, heads=(4, 2), head_dim=64, device="cuda")
        for how in (LayerAttention(0.1), LayerAttention(0.1, window=30, sinks=torch.ones(4, device="cuda"))):
            rows.attend(rows.triton(), how)  # compiles
            try:
                torch.cuda.set_sync_debug_mode("error")
                rows.attend(rows.triton(), how)
            finally:
                torch.cuda.set_sync_debug_mode("default")
