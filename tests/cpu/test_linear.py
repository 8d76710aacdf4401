"""A linear layer with packed weights computes the same as the plain one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from baton_cpu.blocks.linear import PackedLinear, can_pack, pack_linears


@pytest.mark.parametrize("shape", [(1,), (7,), (64,), (2, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_a_packed_layer_agrees_with_a_plain_one(
    shape: tuple[int, ...], bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(48, 33, bias=bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(*shape, 48, dtype=dtype)
    expected = plain(x)
    model = nn.Sequential(plain)
    assert pack_linears(model) == isinstance(model[0], PackedLinear) == can_pack(plain.weight)
    packed = model(x)
    assert (packed.shape, packed.dtype) == ((*shape, 33), dtype)
    torch.testing.assert_close(packed, expected, atol=tolerance, rtol=tolerance)


def test_no_rows_give_no_rows() -> None:
    assert PackedLinear(nn.Linear(8, 3))(torch.empty(1, 0, 8)).shape == (1, 0, 3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.requires_grad_(False)


def test_every_plain_linear_of_a_model_is_packed_and_a_tied_embedding_stays() -> None:
    model = Tied()
    tokens = torch.tensor([3, 9])
    expected = linear(model.embed(tokens), model.embed.weight)
    assert pack_linears(model) == 3
    assert [type(module) for module in (*model.layers, model.head)] == [PackedLinear] * 3
    assert [name for name, _ in model.named_parameters()] == ["embed.weight"]
    torch.testing.assert_close(model.head(model.embed(tokens)), expected)


def test_a_layer_with_a_forward_of_its_own_is_left_alone() -> None:
    class Doubling(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(Doubling(4, 4))
    assert pack_linears(model) == 0
    assert type(model[0]) is Doubling


def test_a_dtype_without_a_kernel_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64))
    assert pack_linears(model) == 0
    assert type(model[0]) is nn.Linear
