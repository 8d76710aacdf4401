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

from baton_cpu.blocks.linear import PackedLinear
from baton_cpu.program import shared_weights
from baton_cpu.program.shared_weights import Holder, PanelRows, SharedWeights
from baton_cpu.program.weights import WeightMemory, packed
from common.errors import StartupError
from common.model.target import TargetModel
from tests.model.paged_model import PagedModel
from tests.support.loading import load_target


@pytest.fixture(params=["whole", "in parts"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in parts":
        monkeypatch.setattr(shared_weights, "PART_BYTES", 1)


@pytest.mark.usefixtures("parts")
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
    assert torch.equal(PanelRows(panels, 33, 70).weight(), layer.weight[33:70])
    panels.view(-1)[7] += 1
    holder = Holder(nn.Sequential(layer), "0")
    with pytest.raises(StartupError, match="packed wrongly"):
        SharedWeights().share(panels, [holder])
    assert holder.layer is layer
