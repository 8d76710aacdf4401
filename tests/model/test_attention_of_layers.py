"""Tests of what a layer says of its attention: windows, soft caps and sinks. All backends share this contract, for new
tokens that follow each other and for drafts, and for KV in FP8.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from baton_cpu.attention import PagedCpuAttention
from common.attention import torch_attention
from common.attention.backend import AttentionBackend, LayerAttention
from common.attention.fp8_kv import to_fp8, widened
from common.attention.torch_attention import TorchAttention
from tests.model.attention_rows import LAYER, Rows

HEADS, HEAD_DIM, SCALING = (4, 2), 16, 0.25
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
BACKENDS = ("torch", "paged", "triton")
ROWS = {
    "decode": ((0, 1), (32, 1), (3, 1), (299, 1)),
    "verify": ((0, 5), (130, 5), (4, 5)),
    "prompts of any length behind any prefix": ((0, 40), (7, 1), (200, 33), (1, 2)),
    "more queries than a kernel takes, behind nothing": ((0, 35),),
}
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
LAYERS = {
    "a window of itself": LayerAttention(SCALING, window=1),
    "a window of 3": LayerAttention(SCALING, window=3),
    "a window of 140": LayerAttention(SCALING, window=140),
    "a window of more than all": LayerAttention(SCALING, window=1000),
    "a soft cap": LayerAttention(SCALING, softcap=0.7),
    "sinks": LayerAttention(SCALING, sinks=SINKS),
    "all of them": LayerAttention(SCALING, window=6, softcap=2.0, sinks=SINKS),
}


def backend_of(name: str, rows: Rows) -> AttentionBackend:
    if name == "triton":
        return rows.triton()
    return (
        TorchAttention()
        if name == "torch"
        else PagedCpuAttention(
            num_heads=HEADS[0], num_kv_heads=HEADS[1], head_dim=HEAD_DIM, dtype=rows.query.dtype, fp8_kv=True
        )
    )


def attended(rows: Rows, how: LayerAttention) -> list[tuple[Tensor, Tensor]]:
    """Returns for each new token all the row's slots, and which of them, by position, it attends."""
    batch, found = rows.batch, []
    token = 0
    for entry, seq_len in enumerate(batch.seq_lens.tolist()):
        slots = batch.req_to_token[batch.req_pool_indices[entry], :seq_len]
        num_new = 1 if batch.extend_lens is None else batch.extend_lens[entry]
        for place in range(num_new):
            if batch.tree_mask is None:
                positions = torch.arange(seq_len - num_new + place + 1)
            else:
                num_before = seq_len - batch.tree_mask.shape[1]
                in_mask = batch.tree_mask[token].nonzero()[:, 0]
                positions = torch.cat([torch.arange(num_before), num_before + in_mask])
            found.append((slots, positions[-how.window :] if how.window else positions))
            token += 1
    return found


def expected_output(rows: Rows, how: LayerAttention) -> Tensor:
    """Returns the output [T, heads, head_dim] in float64, computed token by token and head by head."""
    batch = rows.batch
    kv = batch.kv[LAYER].double()
    kv[0, batch.out_cache_loc], kv[1, batch.out_cache_loc] = rows.key.double(), rows.value.double()
    output = torch.empty(rows.query.shape, dtype=torch.float64)
    for token, (slots, positions) in enumerate(attended(rows, how)):
        for head in range(HEADS[0]):
            keys, values = (kv[plane, slots[positions], head // (HEADS[0] // HEADS[1])] for plane in (0, 1))
            weights = (keys @ rows.query[token, head].double() * how.scaling).tolist()
            if how.softcap is not None:
                weights = [how.softcap * math.tanh(score / how.softcap) for score in weights]
            weights = [math.exp(score) for score in weights]
            total = sum(weights) + (0 if how.sinks is None else math.exp(how.sinks[head]))
            output[token, head] = (torch.tensor(weights, dtype=torch.float64) / total) @ values
    return output


def without_what_is_behind(rows: Rows, how: LayerAttention) -> Rows:
    """Returns the rows with NaN in the KV of each token that no new token attends."""
    kv = rows.batch.kv.clone()
    every, read = [], []
    for slots, positions in attended(rows, how):
        every.append(slots)
        read.append(slots[positions])
    behind = torch.cat(every)[~torch.isin(torch.cat(every), torch.cat(read))]
    kv[:, :, behind] = float("nan")
    return replace(rows, batch=replace(rows.batch, kv=kv))


def check(backend: str, rows: Rows, how: LayerAttention, *, fp8: bool = False) -> None:
    if fp8:
        rows = rows.with_kv(lambda kv: widened(to_fp8(kv), kv.dtype))
    expected, tolerance = expected_output(rows, how), TOLERANCES[rows.query.dtype]
    if how.window is not None:
        rows = without_what_is_behind(rows, how)
    if fp8:
        rows = rows.with_kv(to_fp8)
    output, _ = rows.attend(backend_of(backend, rows), how)
    assert output.dtype == rows.query.dtype
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("layer", "dtype"), [*((layer, torch.float32) for layer in LAYERS), ("all of them", torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("lens", ROWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_says_how_tokens_attend(backend: str, dtype: torch.dtype, lens: str, layer: str) -> None:
    check(backend, Rows.of(ROWS[lens], heads=HEADS, head_dim=HEAD_DIM, dtype=dtype), LAYERS[layer])


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("lens", "num_masked"), [("verify", 5), ("decode behind drafts", 4), ("many drafts", 33)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_says_so_of_drafts_too(backend: str, lens: str, num_masked: int, layer: str) -> None:
    rows = {**ROWS, "decode behind drafts": ((3, 1), (150, 1)), "many drafts": ((0, 33), (20, 33))}[lens]
    check(backend, Rows.of(rows, heads=HEADS, head_dim=HEAD_DIM).with_drafts(num_masked), LAYERS[layer])


@pytest.mark.parametrize(
    ("layer", "dtype"), [("sinks", torch.float32), ("all of them", torch.float32), ("all of them", torch.bfloat16)]
)
@pytest.mark.parametrize("num_masked", [0, 5])
@pytest.mark.parametrize("lens", ROWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_kv_may_be_in_fp8(backend: str, lens: str, num_masked: int, dtype: torch.dtype, layer: str) -> None:
    rows = Rows.of(ROWS[lens], heads=HEADS, head_dim=HEAD_DIM, dtype=dtype)
    rows = rows.with_drafts(num_masked) if num_masked and lens == "verify" else rows
    check(backend, rows, LAYERS[layer], fp8=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_number_of_fp8_is_read_as_itself(backend: str) -> None:
    """Each row attends one token alone, so its output is the token's value."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers.where(numbers & 0x7F != 0x7F, 0).view(-1, HEADS[1], 2)  # without the NaNs
    rows = Rows.of(((0, 1),) * len(numbers), heads=HEADS, head_dim=HEAD_DIM)
    values = numbers.repeat(1, 1, HEAD_DIM // 2)
    rows = replace(rows.with_kv(to_fp8), value=values)
    output, kv = rows.attend(backend_of(backend, rows))
    assert torch.equal(output[:, :: HEADS[0] // HEADS[1]], widened(values, torch.float32))
    assert torch.equal(kv[LAYER, 1, rows.batch.out_cache_loc], values)


def test_numbers_are_rounded_to_the_nearest_and_what_is_no_number_stays_none() -> None:
    numbers = torch.tensor([0.0, 17.1, 448.0, 1e6, -1e6, 2.0**-9, 2.0**-11, math.inf, -math.inf, math.nan])
    rounded = torch.tensor([0.0, 18.0, 448.0, 448.0, -448.0, 2.0**-9, 0.0, math.nan, math.nan, math.nan])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = numbers.to(dtype)
        seen, expected = widened(to_fp8(given), torch.float32), rounded.where(given.isfinite(), math.nan)
        assert torch.equal(seen.nan_to_num(7), expected.nan_to_num(7))
    scaled = widened(to_fp8(numbers, 0.5), torch.float32)
    assert torch.equal(scaled[:3], torch.tensor([0.0, 36.0, 448.0])) and scaled.isnan().sum() == 3


@pytest.mark.parametrize("layer", ["a soft cap", "sinks", "all of them"])
def test_scores_are_computed_for_some_queries_at_a_time(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "_MAX_SCORE_BYTES", 4 * HEADS[0] * 300)
    for lens in ROWS.values():
        check("torch", Rows.of(lens, heads=HEADS, head_dim=HEAD_DIM), LAYERS[layer])


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_one_forward_differ(backend: str) -> None:
    rows = Rows.of(ROWS["verify"], heads=HEADS, head_dim=HEAD_DIM)
    plan = backend_of(backend, rows).plan(replace(rows.batch, kv=rows.batch.kv.clone()))
    for how in (*LAYERS.values(), *LAYERS.values()):
        output = plan.attend(LAYER, rows.query, rows.key, rows.value, how)
        torch.testing.assert_close(output.double(), expected_output(rows, how), atol=1e-5, rtol=1e-5)
