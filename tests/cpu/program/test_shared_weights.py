"""Operators compute with a program's panels the same as with weights of their own, which are freed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baton_cpu.blocks.linear import PackedLinear, can_pack
from baton_cpu.program import shared_weights
from baton_cpu.program.kernel.dot_products import PANEL_WIDTH
from baton_cpu.program.shared_weights import Holder, PanelLinear, PanelRows, SharedWeights
from baton_cpu.program.weights import WeightMemory, packed
from common.errors import StartupError
from common.model.loader import load_target
from common.model.target import TargetModel
from tests.model.paged_model import PagedModel

DTYPES = [torch.float32, torch.bfloat16]


def panels_of(weight: Tensor) -> Tensor:
    return packed(weight, WeightMemory(), lambda: None)


def linear(num_outputs: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(num_outputs)
    return nn.Linear(48, num_outputs, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.fixture(params=["whole", "in parts"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in parts":
        monkeypatch.setattr(shared_weights, "_PART_BYTES", 1)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("start", "stop"), [(0, 200), (0, 7), (5, 70), (32, 64), (64, 200), (33, 34)])
def test_rows_of_panels_are_those_that_were_packed(start: int, stop: int, dtype: torch.dtype) -> None:
    weight = torch.randn(200, 48).to(dtype)
    assert torch.equal(PanelRows(panels_of(weight), start, stop).weight(), weight[start:stop])


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_that_share_panels_compute_the_same(dtype: torch.dtype, bias: bool) -> None:
    layers = [linear(num_outputs, dtype, bias=bias) for num_outputs in (40, 8, 8)]
    kinds: list[Callable[[nn.Linear], nn.Module]] = [lambda layer: layer]
    if can_pack(layers[0].weight):
        kinds.append(PackedLinear)
    x = torch.randn(1, 5, 48).to(dtype)
    for kind in kinds:
        model = nn.ModuleList([kind(layer) for layer in layers])
        expected = [layer(x) for layer in model]
        holders, shared = [Holder(model, str(place)) for place in range(3)], SharedWeights()
        shared.share(panels_of(shared.weight_of(holders)), holders)
        assert [type(layer) for layer in model] == [PanelLinear] * 3
        assert_same([layer(x) for layer in model], expected)
        shared.end(lambda: None)
        assert [type(layer) for layer in model] == [type(kind(layers[0]))] * 3
        assert_same([layer(x) for layer in model], expected)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gate_and_its_partner_share_each_panel(dtype: torch.dtype) -> None:
    plain = [linear(48, dtype, bias=False) for _ in range(2)]
    if not can_pack(plain[0].weight):
        pytest.skip("this CPU has no kernel for the dtype")
    model = nn.ModuleList(map(PackedLinear, plain))
    x, other = torch.randn(1, 5, 48).to(dtype), torch.randn(1, 5, 48).to(dtype)

    def outputs() -> list[Tensor]:
        gate, up = (layer for layer in model)
        return [gate.silu(x), up.times(other, x)]  # type: ignore[operator]

    expected = outputs()
    halves = [layer.weight.unflatten(0, (-1, PANEL_WIDTH // 2)) for layer in plain]
    SharedWeights().share_pair(panels_of(torch.stack(halves, 1).flatten(0, 2)), Holder(model, "0"), Holder(model, "1"))
    assert_same(outputs(), expected)


@pytest.mark.parametrize("optimizes_modules", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3_moe"])
def test_a_model_holds_no_linear_weight_twice_once_it_is_packed(
    architecture: str, dtype: str, optimizes_modules: bool, tiny_model_dir: Callable[[str], Path]
) -> None:
    target = load_target(
        tiny_model_dir(architecture), device="cpu", dtype=dtype, fuses=True, optimizes_modules=optimizes_modules
    )
    own = [weakref.ref(layer) for layer in linears(target)]
    expected = logits(target)
    assert target.new_decoder is not None
    decoder: Any = target.new_decoder(lambda: None)
    gc.collect()
    assert own and not any(layer() for layer in own)
    assert_same(logits(target), expected)
    decoder.unshare(lambda: None)
    assert len(linears(target)) == len(own)
    assert_same(logits(target), expected)


def assert_same(seen: Any, expected: Any) -> None:
    """Asserts equality, except that sums in float32 may be taken in another order."""
    torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-5)


def linears(target: TargetModel) -> list[nn.Module]:
    """Returns the model's linear layers that have weights of their own."""
    return [module for _, module in target.modules_of(nn.Module) if type(module) in (nn.Linear, PackedLinear)]


def logits(target: TargetModel) -> Tensor:
    return PagedModel(target, num_rows=1).extend({1: range(3, 20)})


def test_a_weight_that_was_packed_wrongly_is_not_shared() -> None:
    layer = nn.Linear(64, 96, bias=False)
    panels = packed(layer.weight.detach(), WeightMemory(), lambda: None)
    panels.view(-1)[7] += 1
    holder = Holder(nn.Sequential(layer), "0")
    with pytest.raises(StartupError, match="packed wrongly"):
        SharedWeights().share(panels, [holder])
    assert holder.layer is layer
