"""Tests that the GPU's sampling kernel chooses the same tokens as PyTorch's operators, in one launch. It runs in
Triton's interpreter; tests/gpu runs it on a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.kernel_variants import Variant
from common.device.triton_launch import Launch
from common.sampling.operators import (
    Ancestors,
    Sampled,
    draw,
    gumbel_noise,
    propose,
    propose_branches,
    row_keys,
    sample,
)
from common.sampling.params import ResolvedSampling
from common.sampling.state import RowStart, SamplingBatch, SamplingState
from common.sampling.triton_draws import TritonDraws

thorough = pytest.mark.thorough
VOCAB = 5000  # more than one kernel program handles at a time
CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")

CUTS: dict[str, dict[str, Any]] = {
    "none": {},
    "cold": {"temperature": 0.02},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_k of nearly all": {"top_k": VOCAB - 1},
    "top_p": {"top_p": 0.6},
    "top_p of the likeliest": {"top_p": 1e-6},
    "top_p of none": {"top_p": 0.0},
    "top_p of nearly all": {"top_p": 0.999},
    "min_p": {"min_p": 0.2},
    "min_p of the likeliest": {"min_p": 1.0},
    "all three": {"top_k": 40, "top_p": 0.8, "min_p": 0.05},
    "top_p of what top_k leaves": {"top_k": 3, "top_p": 0.95},
}
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.3},
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 2.0},
    "bias": {"logit_bias": ((0, -50.0), (7, 12.0), (4999, 12.0))},
    "ends": {"min_tokens": 6, "eos_token_ids": (11, 12), "stop_token_ids": (20,)},
    "all": {
        "top_p": 0.9,
        "repetition_penalty": 0.8,
        "presence_penalty": -0.5,
        "logit_bias": ((3, 5.0),),
        "min_tokens": 3,
        "eos_token_ids": (3,),
    },
}


def requests(options: Sequence[dict[str, Any]]) -> list[ResolvedSampling]:
    return [ResolvedSampling(seed=1 + number, max_tokens=64, **each) for number, each in enumerate(options)]


def state_of(
    sampling: Sequence[ResolvedSampling],
    kernels: TritonDraws | None,
    *,
    vocab_size: int = VOCAB,
    device: torch.device = CPU,
) -> SamplingState:
    state = SamplingState(max_rows=len(sampling) + 1, vocab_size=vocab_size, torch_device=device, kernels=kernels)
    state.reset([RowStart(row, each, row % 3, (1, 2, 3, 4, 4), 3) for row, each in enumerate(sampling, start=1)])
    return state


def both(
    logits: Tensor, sampling: Sequence[ResolvedSampling], *, positions: Sequence[int] = (5,)
) -> tuple[list[Sampled], list[Sampled]]:
    """Draws tokens for the same rows at each position in turn, by the kernels and then by operators, and returns both
    results. The rows count the tokens drawn.
    """
    drawn = []
    for kernels in (TritonDraws(), None):
        state = state_of(sampling, kernels, vocab_size=logits.shape[1], device=logits.device)
        rows = torch.arange(1, len(sampling) + 1, device=logits.device)
        batch = SamplingBatch.of(sampling)
        drawn.append([sample(logits.clone(), rows, torch.full_like(rows, place), state, batch) for place in positions])
    return drawn[0], drawn[1]


def check_same(seen: Sequence[Sampled], expected: Sequence[Sampled]) -> None:
    for ours, theirs in zip(seen, expected, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.is_invalid.tolist() == theirs.is_invalid.tolist()


def random_logits(num_rows: int, seed: int = 0, vocab_size: int = VOCAB) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("rules", [pytest.param(CUTS, id="cuts", marks=thorough), pytest.param(RULES, id="rules")])
def test_it_draws_the_same_tokens(rules: dict[str, dict[str, Any]]) -> None:
    sampling = requests(list(rules.values()))
    check_same(*both(random_logits(len(sampling)), sampling, positions=(5, 6)))


@pytest.mark.parametrize(
    "seed", [pytest.param((1 << 63) - 1, marks=thorough), 1 << 63, pytest.param((1 << 64) - 1, marks=thorough)]
)
def test_seeds_have_64_bits(seed: int) -> None:
    """The host's table and the kernel have the same 64 bits, although torch has no full support for unsigned 64-bit
    numbers.
    """
    options: list[dict[str, Any]] = [{}, {"temperature": 0.3}, CUTS["top_p"], CUTS["all three"]]
    sampling = [ResolvedSampling(seed=seed, max_tokens=64, **each) for each in options]
    check_same(*both(random_logits(len(sampling)), sampling, positions=(0, 5, 1 << 20)))


def test_log_probabilities_are_of_the_unmodified_distribution() -> None:
    sampling = requests([{"num_logprobs": 2, "logit_bias": ((9, 40.0),)}, {}])
    (ours,), (theirs,) = both(random_logits(2), sampling)
    assert ours.logprobs is not None and theirs.logprobs is not None
    assert torch.equal(ours.logprobs, theirs.logprobs) and ours.token_ids[0] == 9


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.5},
        *(pytest.param(options, marks=thorough) for options in ({"top_k": 6}, {"top_k": 6, "top_p": 0.9})),
    ],
    ids=str,
)
def test_of_equal_tokens_the_first_are_kept(options: dict[str, Any]) -> None:
    """Three tokens have a higher logit than all others. Ten more have equal logits, on both sides of the end of a
    kernel's block.
    """
    logits = torch.full((1, VOCAB), -4.0)
    logits[0, [4990, 100, 2000]] = 0.5
    logits[0, [4096, 4097, 4095, 17, 4998, 4999, 0, 4000, 3000, 1000]] = torch.tensor([0.0, -0.0] * 5)
    logits = logits + 1.0
    sampling = requests([{"temperature": 1.0, **options}])
    seen, expected = both(logits, sampling, positions=range(5, 17))
    check_same(seen, expected)
    assert len({int(each.token_ids) for each in seen}) > 3, "nothing was drawn of those that are alike"


@pytest.mark.parametrize("options", [CUTS[name] for name in ("none", "top_k", "top_p", "min_p", "all three")], ids=str)
def test_numbers_that_are_none_are_told_of(options: dict[str, Any]) -> None:
    """NaN and infinite logits are also reported by the operators, even where top_p leaves nothing of a row."""
    logits = random_logits(6, vocab_size=50)
    logits[0, 45] = NAN
    logits[1, 3] = INF
    logits[2] = -INF
    logits[3, 1:] = -INF
    logits[4] = NAN
    for drawn in both(logits, requests([options] * 6)):
        assert drawn[0].is_invalid.tolist() == [True, True, True, False, True, False]
        assert int(drawn[0].token_ids[3]) == 0


@thorough
def test_few_tokens_of_which_many_are_alike() -> None:
    """The vocabulary is smaller than a kernel's block. All its logits are equal, or all tokens but one are
    impossible.
    """
    logits = torch.stack([torch.zeros(50), torch.full((50,), -INF), torch.linspace(-1e30, 1e30, 50), torch.zeros(50)])
    logits[1, [3, 4]] = 0.0
    sampling = requests([{"top_k": 7}, {"top_p": 0.7}, {"top_p": 0.5}, {"top_p": 0.33, "min_p": 0.5}])
    check_same(*both(logits, sampling, positions=range(5, 10)))


def test_drafted_ancestors_count_as_output() -> None:
    """A draw that verifies drafts counts the drafts before it as output for penalties, but does not change the rows'
    stored counts.
    """
    sampling = requests([{"temperature": 0.0, "frequency_penalty": 1.0, "presence_penalty": 0.5}] * 3)
    rows, positions = torch.tensor([1, 2, 3]), torch.tensor([5, 6, 7])
    ancestors = Ancestors(
        torch.tensor([[8, 8, 8], [9, 8, 8], [0, 0, 0]]),
        torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]], dtype=torch.int32),
    )
    logits = torch.zeros(3, VOCAB)
    logits[:, 8], logits[:, 10] = 3.6, 2.0
    drawn = []
    for kernels in (TritonDraws(), None):
        state = state_of(sampling, kernels)
        before = state.output_counts.clone()
        drawn.append(draw(logits.clone(), rows, positions, state, SamplingBatch.of(sampling), ancestors))
        assert torch.equal(state.output_counts, before)
    check_same(drawn[:1], drawn[1:])
    assert drawn[0].token_ids.tolist() == [10, 8, 8]


@pytest.mark.parametrize("draft_vocab_size", [300, 4999])
def test_drafts_are_proposed_with_the_same_noise(draft_vocab_size: int) -> None:
    sampling = requests([{}, {"temperature": 0.0}, {"temperature": 0.3, "top_p": 0.5}])
    token_ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:draft_vocab_size].sort().values
    rows, positions = torch.tensor([1, 2, 3]), torch.tensor([5, 6, 7])
    logits, batch = random_logits(3, 4, draft_vocab_size), SamplingBatch.of(sampling)
    by_kernels, by_operators = (state_of(sampling, kernels) for kernels in (TritonDraws(), None))
    ours, theirs = (
        propose(logits.clone(), token_ids, rows, positions, each, batch) for each in (by_kernels, by_operators)
    )
    assert ours.tolist() == theirs.tolist()
    branches = [
        propose_branches(logits.clone(), token_ids, rows, positions, each, batch, topk=4)
        for each in (by_kernels, by_operators)
    ]
    assert branches[0][0].tolist() == branches[1][0].tolist()
    torch.testing.assert_close(branches[0][1], branches[1][1])


def test_noise_is_the_same_to_the_last_few_bits() -> None:
    sampling = requests([{}] * 4)
    state = state_of(sampling, TritonDraws())
    rows, positions = torch.arange(1, 5), torch.tensor([0, 5, 1 << 20, 77])
    drawn = TritonDraws().couple(torch.zeros(4, VOCAB), state.token_ids, rows, positions, state)
    expected = gumbel_noise(row_keys(state.seed[rows], state.choice_index[rows], positions), state.token_ids)
    torch.testing.assert_close(drawn, expected, rtol=1e-6, atol=1e-6)


class _Counted(TorchDispatchMode):
    """Counts the operators that would launch a kernel on a GPU. Views and allocations launch none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.overloadpacket not in (torch.ops.aten.empty, torch.ops.aten.detach):
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [*CUTS.values(), *RULES.values()], ids=[*CUTS, *RULES])
def test_a_step_is_one_launch_whatever_its_requests_want(options: dict[str, Any]) -> None:
    """Besides that launch, no operator launches a kernel."""
    launches: list[Launch] = []
    meta = torch.device("meta")
    state = SamplingState(max_rows=8, vocab_size=VOCAB, torch_device=meta, kernels=TritonDraws(launches.append))
    rows = torch.empty(8, dtype=torch.int64, device=meta)
    logits = torch.empty((8, VOCAB), device=meta)
    with _Counted() as counted:
        drawn = sample(logits, rows, rows, state, SamplingBatch.of(requests([options] * 8)))
    assert not counted.seen and len(launches) == 1
    assert launches[0].grid == (8,) and drawn.token_ids.shape == drawn.is_invalid.shape == (8,)


def test_no_batch_needs_a_kernel_of_its_own() -> None:
    """The kernels do not depend on the batch's size or on where its columns start. The target has one kernel, and
    the draft one for each way of drafting.
    """
    state = state_of(requests([{}] * 9), None)
    state_ids = state.token_ids[:300].clone()
    seen: dict[str, set[Variant]] = {"draw": set(), "propose": set(), "couple": set()}

    def noted(name: str) -> TritonDraws:
        return TritonDraws(lambda launch: seen[name].add(Variant.of(launch)))

    for num_rows in range(1, 10):
        for offset in (0, 1):
            column = torch.arange(12)[offset : offset + num_rows]
            storage = torch.zeros(num_rows * VOCAB + 1)
            logits = storage[offset : offset + num_rows * VOCAB].view(num_rows, VOCAB)
            counted = torch.ones((num_rows, 3), dtype=torch.int32)
            ancestors = Ancestors(counted.to(torch.int64), counted)
            noted("draw").draw(logits, column, column, state, ancestors if offset else None, is_counted=offset == 0)
            for way in (noted("propose").propose, noted("couple").couple):
                way(logits[:, :300].contiguous(), state_ids, column, column, state)
    assert {name: len(variants) for name, variants in seen.items()} == {"draw": 1, "propose": 1, "couple": 1}


def test_no_rows_launch_nothing() -> None:
    state = state_of(requests([{}]), TritonDraws())
    nothing = torch.empty(0, dtype=torch.int64)
    drawn = sample(torch.empty(0, VOCAB), nothing, nothing, state, SamplingBatch.of([]))
    assert drawn.token_ids.shape == drawn.is_invalid.shape == (0,)
