"""Tests of layers of experts in programs: any number of tokens, experts and choices, on any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_cpu.program.builder import AttentionSize, Experts, FusedDecoder, ProgramBuilder
from baton_cpu.program.fusing import fuse, new_forwards
from baton_cpu.program.kernel.operations import ITEM_ROWS
from common.attention.backend import ForwardInput
from common.model.forward_program import ForwardProgram
from tests.support.loading import load_target

_HEAD_DIM, _WIDTH, _INNER, _MAX_TOKENS = 8, 72, 48, 1024
_EPSILON = 1e-3


def load_kernels(directory: Path, dtype: str) -> None:
    model = load_target(directory, device="cpu", dtype=dtype, fuses=True)
    fuse(model, num_threads=1, max_tokens=1)
    assert model._program is not None and model._program.close(5.0)


@pytest.fixture(scope="module", autouse=True)
def _kernels(tiny_model_dir: Callable[[str], Path]) -> None:
    load_kernels(tiny_model_dir("llama"), "float32")


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])
def dtype(request: pytest.FixtureRequest, tiny_model_dir: Callable[[str], Path]) -> torch.dtype:
    load_kernels(tiny_model_dir("llama"), request.param)
    return getattr(torch, request.param)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Layer:
    """A program that computes one layer of experts, and outputs its rows. Token number n has row n of `table`."""

    experts: Experts
    norm: Tensor
    table: Tensor

    @classmethod
    def of(
        cls,
        num_experts: int,
        num_chosen: int,
        *,
        dtype: torch.dtype = torch.float32,
        weights_add_up: bool = True,
        rounds_weights: bool = False,
    ) -> Layer:
        generator = torch.Generator().manual_seed(num_experts)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        experts = Experts(
            router=3 * noise(num_experts, _WIDTH).to(dtype),
            gate_up=2 * noise(num_experts, 2 * _INNER, _WIDTH).to(dtype),
            down=3 * noise(num_experts, _WIDTH, _INNER).to(dtype),
            num_chosen=num_chosen,
            weights_add_up=weights_add_up,
            rounds_weights=rounds_weights,
        )
        return cls(experts, 1 + noise(1, _WIDTH)[0].to(dtype), 5 * noise(_MAX_TOKENS, _WIDTH).to(dtype))

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    @contextmanager
    def program(self, num_threads: int = 2) -> Iterator[ForwardProgram]:
        builder = ProgramBuilder(self.dtype)
        _, states, _ = builder.buffer(1, is_float=True), builder.buffer(_WIDTH), builder.buffer(1)
        qkv, attended = builder.buffer(3 * _HEAD_DIM), builder.buffer(_HEAD_DIM, is_input=True)
        builder.embed(self.table[:, : 3 * _HEAD_DIM].contiguous(), qkv)
        builder.attend(qkv, attended, AttentionSize(1, 1, _HEAD_DIM, 1.0), layer=0)
        builder.embed(self.table, states)
        builder.experts(states, self.experts, norm=self.norm, epsilon=_EPSILON)
        ones = torch.ones((_MAX_TOKENS, _HEAD_DIM), dtype=self.dtype)
        decoder = FusedDecoder(builder.program(), ones, torch.zeros_like(ones))
        (program,) = new_forwards([decoder], num_threads=num_threads, max_tokens=_MAX_TOKENS)
        try:
            yield program
        finally:
            assert program.close(5.0)

    def expected(self, tokens: Tensor) -> Tensor:
        """Returns the expected rows of these tokens, each computed by itself. Numbers are rounded to the dtype where
        the model's own layers round them.
        """

        def rounded(numbers: Tensor) -> Tensor:
            return numbers.to(self.dtype).double()

        experts, rows = self.experts, self.table[tokens].double()
        normed = rounded(rows * (rows.square().mean(1, keepdim=True) + _EPSILON).rsqrt())
        normed = rounded(normed * self.norm.double())
        scores = rounded(normed @ experts.router.double().T).softmax(1)
        outputs = torch.zeros_like(rows)
        for output, x, of_token in zip(outputs, normed, scores, strict=True):
            best = of_token.sort(descending=True, stable=True).indices[: experts.num_chosen]
            shares = of_token[best] / (of_token[best].sum() if experts.weights_add_up else 1)
            for expert, share in zip(best.tolist(), rounded(shares) if experts.rounds_weights else shares, strict=True):
                gate, up = (experts.gate_up[expert].double() @ x).chunk(2)
                gated = rounded(rounded(torch.nn.functional.silu(gate)) * up)
                output += share * rounded(experts.down[expert].double() @ gated)
        return (rows + rounded(outputs)).to(self.dtype)


def batch(tokens: Tensor, dtype: torch.dtype) -> ForwardInput:
    """Returns one row of new tokens."""
    num = len(tokens)
    return ForwardInput(
        input_ids=tokens,
        positions=torch.arange(num),
        out_cache_loc=torch.arange(1, num + 1),
        req_to_token=torch.arange(1, num + 1).repeat(2, 1),
        req_pool_indices=torch.tensor([1]),
        seq_lens=torch.tensor([num]),
        prefix_lens=(0,),
        extend_lens=(num,),
        max_seq_len=num,
        kv=torch.zeros((1, 2, num + 1, 1, _HEAD_DIM), dtype=dtype),
        logits_rows=None,
    )


def states_of(program: ForwardProgram, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    _, states, _ = program.forward(batch(tokens, dtype))
    assert states is not None
    return states


@pytest.mark.parametrize("rounds_weights", [True, False])
@pytest.mark.parametrize("weights_add_up", [True, False])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(8, 2), (40, 3), (4, 1), (3, 3), (64, 8)])
def test_each_token_gets_the_outputs_of_its_experts(
    dtype: torch.dtype, num_experts: int, num_chosen: int, weights_add_up: bool, rounds_weights: bool
) -> None:
    layer = Layer.of(num_experts, num_chosen, dtype=dtype, weights_add_up=weights_add_up, rounds_weights=rounds_weights)
    with layer.program() as program:
        for num_tokens in (1, 2, 7, 9, 33, 500):
            tokens = torch.arange(num_tokens)
            seen, expected = states_of(program, tokens, dtype), layer.expected(tokens)
            if dtype == torch.float32:
                torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
            else:
                same = (seen == expected).float().mean()  # sums in another order round a few numbers differently
                assert same > 0.95, f"{same:.1%} of {num_tokens} tokens' numbers are those expected"


def test_one_expert_takes_more_tokens_than_an_item_has_rows() -> None:
    layer = Layer.of(8, 2)
    tokens = torch.tensor([5, 9]).repeat(ITEM_ROWS + 3)
    with layer.program() as program:
        seen = states_of(program, tokens)
    torch.testing.assert_close(
        seen, layer.expected(torch.tensor([5, 9])).repeat(ITEM_ROWS + 3, 1), rtol=1e-4, atol=1e-4
    )


def test_the_numbers_are_the_same_bits_whoever_shares_the_forward() -> None:
    layer = Layer.of(8, 2)
    tokens, seen = torch.arange(300), []
    for num_threads in (1, 2, 3):
        with layer.program(num_threads) as program:
            for size in (1, 5, 40, 300):
                seen.append(states_of(program, tokens[:size])[0])
                seen.append(states_of(program, tokens[:size].flip(0))[-1])
    assert all(torch.equal(each, seen[0]) for each in seen)


def test_of_equal_scores_the_first_experts_count() -> None:
    layer = Layer.of(6, 2)
    alike = replace(layer, experts=replace(layer.experts, router=layer.experts.router[:1].repeat(6, 1)))
    only = [each[:2].contiguous() for each in (alike.experts.router, alike.experts.gate_up, alike.experts.down)]
    first = replace(layer, experts=Experts(*only, num_chosen=2, weights_add_up=True, rounds_weights=False))
    tokens = torch.arange(20)
    with alike.program() as program:
        torch.testing.assert_close(states_of(program, tokens), first.expected(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_token_without_numbers_leaves_the_others_alone(bad: float) -> None:
    layer = Layer.of(8, 2)
    table = layer.table.clone()
    table[3] = bad
    tokens = torch.arange(12)
    with replace(layer, table=table).program() as program:
        seen = states_of(program, tokens)
    assert not seen[3].isfinite().any()
    others = tokens != 3
    torch.testing.assert_close(seen[others], layer.expected(tokens)[others], rtol=1e-4, atol=1e-4)


def test_nothing_is_written_past_what_was_set_aside(guards: list[NDArray[np.uint8]]) -> None:
    layer = Layer.of(8, 2)
    with layer.program(num_threads=1) as program:
        for num_tokens in (1, 9, 100, 600):
            states_of(program, torch.arange(num_tokens) % 7)
    assert guards and all((guard == 7).all() for guard in guards)
