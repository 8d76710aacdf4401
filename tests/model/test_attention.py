"""Tests of the contract that all attention backends share: what a layer and the masks of drafts say of how tokens
attend, for rows of any length, and for KV in FP8.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from _pytest.mark import ParameterSet
from torch import Tensor

from baton_cpu.attention import PagedCpuAttention
from common.attention import torch_attention
from common.attention.backend import AttentionBackend, AttentionPlan, ForwardInput, LayerAttention
from common.attention.fp8_kv import to_fp8, widened
from common.attention.torch_attention import TorchAttention
from tests.model.attention_rows import LAYER, Rows

HEADS, HEAD_DIM, SCALING = (4, 2), 16, 0.25
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
BACKENDS = ("torch", "paged", "triton")
ROWS = {
    "decode": ((0, 1), (32, 1), (3, 1), (299, 1)),
    "verify": ((0, 5), (130, 5), (4, 5)),
    "prompts of any length behind any prefix": ((0, 40), (7, 1), (60, 33), (1, 2)),
    "more queries than a kernel takes, behind nothing": ((0, 35),),
}
SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
LAYERS = {
    "all tokens": LayerAttention(SCALING),
    "a window of itself": LayerAttention(SCALING, window=1),
    "a window of 3": LayerAttention(SCALING, window=3),
    "a window of 140": LayerAttention(SCALING, window=140),
    "a window of more than all": LayerAttention(SCALING, window=1000),
    "a soft cap": LayerAttention(SCALING, softcap=0.7),
    "sinks": LayerAttention(SCALING, sinks=SINKS),
    "all of them": LayerAttention(SCALING, window=6, softcap=2.0, sinks=SINKS),
}


thorough = pytest.mark.thorough


def typed(layers: Iterable[str], *, quick: str) -> list[ParameterSet]:
    """Returns (layer, dtype) for tests: all layers in float32, and two in 16 bits. Those but `quick` are thorough."""
    cases = [(layer, torch.float32, () if layer == quick else thorough) for layer in layers]
    cases += [("all of them", torch.bfloat16, thorough), ("all tokens", torch.float16, thorough)]
    return [pytest.param(layer, dtype, marks=marks, id=f"{layer}-{dtype}") for layer, dtype, marks in cases]


DRAFTS = {
    "a tree": (ROWS["verify"], 5),
    "a level of a tree behind earlier ones": (((6, 3), (20, 3), (41, 3)), 9),
    "one token of each row behind earlier ones": (((3, 1), (150, 1)), 4),
    "more queries than a kernel takes": (((0, 33), (20, 33)), 33),
}
"""Cases by name: (earlier and new tokens of each row, number of its last tokens that the mask covers)."""


def rows_of(lens: tuple[tuple[int, int], ...], dtype: torch.dtype = torch.float32) -> Rows:
    return Rows.of(lens, heads=HEADS, head_dim=HEAD_DIM, dtype=dtype)


def backend_of(name: str, rows: Rows) -> AttentionBackend:
    if name == "torch":
        return TorchAttention()
    if name == "triton":
        return rows.triton()
    (_, num_heads, head_dim), num_kv_heads, dtype = rows.query.shape, rows.key.shape[1], rows.query.dtype
    fp8_kv = rows.batch.kv.dtype != dtype
    return PagedCpuAttention(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, fp8_kv=fp8_kv
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
    """Returns the output [T, heads, head_dim] in float64, computed token by token."""
    batch = rows.batch
    kv = batch.kv[LAYER].double()
    kv[0, batch.out_cache_loc], kv[1, batch.out_cache_loc] = rows.key.double(), rows.value.double()
    output, num_shared = [], rows.query.shape[1] // kv.shape[2]
    for query, (slots, positions) in zip(rows.query.double(), attended(rows, how), strict=True):
        keys, values = kv[:, slots[positions]].repeat_interleave(num_shared, dim=2)
        scores = torch.einsum("thd,hd->ht", keys, query) * how.scaling
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        if how.sinks is not None:
            scores = torch.cat([scores, how.sinks.double().unsqueeze(1)], dim=1)
        output.append(torch.einsum("ht,thd->hd", scores.softmax(1)[:, : len(keys)], values))
    return torch.stack(output)


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


def check(backend: AttentionBackend, rows: Rows, how: LayerAttention, expected: Tensor) -> None:
    output, kv = rows.attend(backend, how)
    assert output.dtype == rows.query.dtype
    tolerance = TOLERANCES[output.dtype]
    torch.testing.assert_close(output.double(), expected, atol=tolerance, rtol=tolerance)
    for plane, written in enumerate((rows.key, rows.value)):
        assert torch.equal(kv[LAYER, plane, rows.batch.out_cache_loc], written)


def check_all(backend: str, rows: Rows, layer: str, *, fp8: bool = False) -> None:
    how = LAYERS[layer]
    if fp8:
        rows = rows.with_kv(lambda kv: widened(to_fp8(kv), kv.dtype))
    expected = expected_output(rows, how)
    if how.window is not None:
        rows = without_what_is_behind(rows, how)
    if fp8:
        rows = rows.with_kv(to_fp8)
    check(backend_of(backend, rows), rows, how, expected)


@pytest.mark.parametrize(("layer", "dtype"), typed(LAYERS, quick="all tokens"))
@pytest.mark.parametrize("lens", ROWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_says_how_tokens_attend(backend: str, lens: str, layer: str, dtype: torch.dtype) -> None:
    check_all(backend, rows_of(ROWS[lens], dtype), layer)


@pytest.mark.parametrize(
    ("layer", "dtype"),
    typed(["all tokens", "a window of itself", "a window of 3", "a window of 140", "all of them"], quick="all of them"),
)
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mask_says_how_drafts_attend(backend: str, drafts: str, layer: str, dtype: torch.dtype) -> None:
    lens, num_masked = DRAFTS[drafts]
    check_all(backend, rows_of(lens, dtype).with_drafts(num_masked), layer)


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [((9, 3), 64, torch.float16), ((8, 1), 20, torch.float32), ((4, 4), 16, torch.bfloat16)],
    ids=str,
)
@thorough
@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_may_have_any_shape(backend: str, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    check_all(backend, Rows.of(ROWS["decode"], heads=heads, head_dim=head_dim, dtype=dtype), "all tokens")


class ChangedMasks(TorchAttention):
    """A wrong backend: it computes with its masks changed in the way `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how

    def plan(self, batch: ForwardInput) -> AttentionPlan:
        mask = batch.tree_mask
        assert mask is not None
        changed = {
            "ignored": None,
            "another row's": mask.roll(mask.shape[0] // len(batch.seq_lens), 0),
            "a column late": mask.roll(1, 1),
        }
        return super().plan(replace(batch, tree_mask=changed[self._how]))


@pytest.mark.parametrize("how", ["ignored", "another row's", "a column late"])
@pytest.mark.parametrize("drafts", [name for name in DRAFTS if "one token" not in name])
def test_it_is_seen_when_masks_are(how: str, drafts: str) -> None:
    lens, num_masked = DRAFTS[drafts]
    rows = rows_of(lens).with_drafts(num_masked)
    with pytest.raises(AssertionError, match="not close"):
        check(ChangedMasks(how), rows, LAYERS["all tokens"], expected_output(rows, LAYERS["all tokens"]))


@pytest.mark.parametrize("column", ["out_cache_loc", "req_pool_indices", "seq_lens"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_column_may_be_one_of_something_wider(backend: str, column: str) -> None:
    """The column is not contiguous, like the slots of one draft of a step, which are a column of a table."""
    lens, num_masked = DRAFTS["a level of a tree behind earlier ones"]
    rows = rows_of(lens).with_drafts(num_masked)
    narrow = getattr(rows.batch, column)
    wide = torch.stack([narrow, torch.zeros_like(narrow)], dim=1)[:, 0]
    assert not wide.is_contiguous()
    check_all(backend, replace(rows, batch=replace(rows.batch, **{column: wide})), "all tokens")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, with which Triton's interpreter computes
@pytest.mark.parametrize("plane", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("poison", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_number_that_is_none_shows_in_its_row_and_in_no_other(backend: str, poison: float, plane: int) -> None:
    rows = rows_of(((150, 1), (30, 1), (20, 1)))
    sound, _ = rows.attend(backend_of(backend, rows))
    slot = rows.batch.req_to_token[rows.batch.req_pool_indices[0], 140]
    rows.batch.kv[LAYER, plane, slot] = poison
    output, _ = rows.attend(backend_of(backend, rows))
    assert not torch.isfinite(output[0]).any(-1).all()
    assert torch.equal(output[1:], sound[1:])


@pytest.mark.parametrize(
    ("backend", "num_before"),
    [*(("paged", number) for number in (14, 15, 16, 32)), ("torch", 16), pytest.param("triton", 16, marks=thorough)],
)
def test_scores_may_be_far_apart_and_the_largest_anywhere(backend: str, num_before: int) -> None:
    """Softmax must subtract the largest score before it takes the exponential. Otherwise the result would be out of
    range. In row number i, token i has the largest score, or the least.
    """
    for sign in (1, -1):
        rows = rows_of(((num_before, 1),) * num_before)
        slots = rows.batch.req_to_token[rows.batch.req_pool_indices].diagonal()[:num_before]
        rows.batch.kv[LAYER, 0, slots] = sign * 300 * rows.query[:, :: HEADS[0] // HEADS[1]]
        check(backend_of(backend, rows), rows, LAYERS["all tokens"], expected_output(rows, LAYERS["all tokens"]))


@pytest.mark.parametrize(("layer", "dtype"), typed(["sinks", "all of them"], quick="all of them"))
@pytest.mark.parametrize(("lens", "num_masked"), [*((lens, 0) for lens in ROWS), ("verify", 5)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_kv_may_be_in_fp8(backend: str, lens: str, num_masked: int, dtype: torch.dtype, layer: str) -> None:
    rows = rows_of(ROWS[lens], dtype)
    check_all(backend, rows.with_drafts(num_masked) if num_masked else rows, layer, fp8=True)


@thorough
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


@pytest.mark.parametrize(
    "layer", ["all of them", *(pytest.param(layer, marks=thorough) for layer in ("a soft cap", "sinks"))]
)
def test_scores_are_computed_for_some_queries_at_a_time(layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "MAX_SCORE_BYTES", 4 * HEADS[0] * 300)
    for lens in ROWS.values():
        check_all("torch", rows_of(lens), layer)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_one_forward_differ(backend: str) -> None:
    rows = rows_of(((0, 5), (7, 5)))
    plan = backend_of(backend, rows).plan(replace(rows.batch, kv=rows.batch.kv.clone()))
    for how in (*LAYERS.values(), LAYERS["a window of 3"]):
        output = plan.attend(LAYER, rows.query, rows.key, rows.value, how)
        torch.testing.assert_close(output.double(), expected_output(rows, how), atol=1e-5, rtol=1e-5)
