"""Tests of sampling: each rule is compared with an independent reference, and the noise depends on the request
alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from common.sampling import operators
from common.sampling.operators import (
    Largest,
    Sampled,
    gumbel_noise,
    largest,
    row_keys,
    sample,
    shape_logits,
    unpack_logprobs,
)
from common.sampling.params import ResolvedSampling, TokenLogprobs
from common.sampling.state import RowStart, SamplingBatch, SamplingState
from tests.support.goodness_of_fit import chi_square_p_value, farthest_p_value
from tests.support.host_scalars import RefuseHostScalars

VOCAB = 50
CPU = torch.device("cpu")


def params(**options: object) -> ResolvedSampling:
    return ResolvedSampling(**{"seed": 7, "max_tokens": 64, **options})  # type: ignore[arg-type]


def state_of(*seeds: RowStart) -> SamplingState:
    state = SamplingState(max_rows=64, vocab_size=VOCAB, torch_device=CPU)
    state.reset(seeds)
    return state


def draw(
    logits: Tensor, requests: list[ResolvedSampling], positions: list[int], rows: list[int] | None = None
) -> Sampled:
    rows = rows or list(range(1, len(requests) + 1))
    state = state_of(*(RowStart(row, request, 0, (1,), 1) for row, request in zip(rows, requests, strict=True)))
    return sample(logits.clone(), torch.tensor(rows), torch.tensor(positions), state, SamplingBatch.of(requests))


def random_logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_p": 0.0}], ids=str)
def test_greedy_takes_the_most_likely_token(options: dict[str, float]) -> None:
    logits = random_logits(4)
    assert torch.equal(draw(logits, [params(**options)] * 4, [9] * 4).token_ids, logits.argmax(1))


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_p": 0.0}], ids=str)
def test_greedy_costs_no_draw_and_gets_no_noise(options: dict[str, float]) -> None:
    request = params(**options)
    assert SamplingBatch.of([request]).is_greedy
    assert state_of(RowStart(1, request, 0, (1,), 1)).floats["temperature"][1] == 0.0


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_temperature_near_0_is_as_good_as_greedy(temperature: float, dtype: torch.dtype) -> None:
    logits = random_logits(4).to(dtype)
    drawn = draw(logits, [params(temperature=temperature, top_p=0.9)] * 4, [9] * 4)
    assert torch.equal(drawn.token_ids, logits.argmax(1)) and not drawn.is_invalid.any()


def test_the_largest_is_the_first_of_several_or_the_first_nan() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, float("nan"), 5.0], [float("-inf")] * 3])
    assert largest(logits).tolist() == logits.argmax(1).tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 12, "top_p": 0.8, "min_p": 0.05}],
    ids=str,
)
def test_draws_follow_the_exact_distribution(options: dict[str, float]) -> None:
    logits = random_logits(1, seed=3)
    num_draws = 40_000
    request = params(**options)
    state = state_of(RowStart(1, request, 0, (1,), 1))
    batch = SamplingBatch.of([request] * num_draws)
    drawn = sample(
        logits.expand(num_draws, VOCAB).clone(),
        torch.ones(num_draws, dtype=torch.int64),
        torch.arange(num_draws),
        state,
        batch,
    )
    expected = reference_distribution(logits.double(), options)[0].numpy() * num_draws
    counts = np.bincount(drawn.token_ids.numpy(), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0, "a token outside the filters was drawn"
    often = expected >= 5
    rest = expected[~often].sum()
    observed = np.append(counts[often], counts[~often].sum()) if rest > 0 else counts[often]
    wanted = np.append(expected[often], rest) if rest > 0 else expected[often]
    wanted *= observed.sum() / wanted.sum()
    assert chi_square_p_value(float(((observed - wanted) ** 2 / wanted).sum()), len(wanted) - 1) > 1e-6


def reference_distribution(logits: Tensor, options: dict[str, float]) -> Tensor:
    """Returns the distribution that transformers' own warpers give, applied in the documented order."""
    scores = logits / options.get("temperature", 1.0)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    if "top_k" in options:
        scores = TopKLogitsWarper(int(options["top_k"]))(ids, scores)
    if "top_p" in options:
        scores = TopPLogitsWarper(options["top_p"])(ids, scores)
    if "min_p" in options:
        scores = MinPLogitsWarper(options["min_p"])(ids, scores)
    return scores.softmax(-1)


def test_the_same_request_draws_the_same_token_at_any_row_and_in_any_batch() -> None:
    logits = random_logits(1, seed=5)
    request = params(seed=123)
    alone = [int(draw(logits, [request], [p], rows=[1]).token_ids[0]) for p in range(40)]
    crowd = [params(seed=s, temperature=0.5 if s % 3 else 0.0) for s in range(15)]
    for place in (0, 8, 15):
        requests = [*crowd[:place], request, *crowd[place:]]
        rows = list(reversed(range(20, 36)))
        many = random_logits(16, seed=6)
        many[place] = logits[0]
        together = [int(draw(many, requests, [p] * 16, rows=rows).token_ids[place]) for p in range(40)]
        assert together == alone
    assert len(set(alone)) > 1


@pytest.mark.parametrize("changed", ["seed", "choice", "position"])
def test_noise_differs_when_any_part_of_its_key_differs(changed: str) -> None:
    one, two = torch.tensor([1]), torch.tensor([2])
    base = row_keys(one, one, one)
    other = row_keys(
        two if changed == "seed" else one, two if changed == "choice" else one, two if changed == "position" else one
    )
    tokens = torch.arange(10_000)
    first, second = gumbel_noise(base, tokens)[0], gumbel_noise(other, tokens)[0]
    assert abs(float(np.corrcoef(first.numpy(), second.numpy())[0, 1])) < 0.05
    assert not torch.equal(first, second)


def test_noise_is_standard_gumbel_and_finite() -> None:
    noise = gumbel_noise(
        row_keys(torch.arange(8), torch.zeros(8, dtype=torch.int64), torch.arange(8)), torch.arange(50_000)
    )
    assert torch.isfinite(noise).all()
    assert farthest_p_value(np.exp(-np.exp(-noise.flatten().double().numpy()))) > 1e-6
    assert farthest_p_value(np.exp(-np.exp(-0.97 * noise.flatten().double().numpy()))) < 1e-6, "it would tell nothing"


def test_the_upper_tail_of_the_noise_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 1,000 smallest bit patterns give the largest noise, and each of them gives its own quantile."""
    patterns = torch.arange(1000, dtype=torch.int32)
    monkeypatch.setattr(operators, "mix32", lambda x: patterns.expand(1, -1).clone())
    drawn = gumbel_noise(torch.zeros(1, dtype=torch.int64), patterns)[0].double()
    expected = -torch.log(-torch.log1p(-(patterns.double() + 0.5) / 2**32))
    assert torch.allclose(drawn, expected, atol=1e-5)


def test_a_64_bit_seed_is_used_whole() -> None:
    logits = torch.zeros(1, VOCAB)
    seeds = [1, 1 + (1 << 40), 1 + (1 << 63)]
    runs = {tuple(int(draw(logits, [params(seed=s)], [p]).token_ids[0]) for p in range(30)) for s in seeds}
    assert len(runs) == 3


def shaped(logits: Tensor, request: ResolvedSampling, token_ids: tuple[int, ...], prompt_len: int) -> Tensor:
    state = state_of(RowStart(1, request, 0, token_ids, prompt_len))
    position = torch.tensor([len(token_ids)])
    return shape_logits(logits.clone(), torch.tensor([1]), position, state, SamplingBatch.of([request]))


def test_repetition_penalty_counts_prompt_and_output() -> None:
    logits = random_logits(1)
    expected = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([[1, 2, 3, 3]]), logits.clone())
    assert torch.allclose(shaped(logits, params(repetition_penalty=1.4), (1, 2, 3, 3), 2), expected)


@pytest.mark.parametrize(
    ("options", "moved"),
    [
        ({"presence_penalty": 0.5, "frequency_penalty": 0.25}, {3: -0.5 - 2 * 0.25}),  # the prompt does not count
        ({"logit_bias": ((2, -100.0), (5, 1.5))}, {2: -100.0, 5: 1.5}),
    ],
    ids=["penalties", "bias"],
)
def test_only_the_logits_of_named_tokens_move(options: dict[str, Any], moved: dict[int, float]) -> None:
    logits = random_logits(1)
    expected = logits.clone()
    for token_id, change in moved.items():
        expected[0, token_id] += change
    assert torch.allclose(shaped(logits, params(**options), (1, 2, 3, 3), 2), expected)


def test_drawn_tokens_are_counted() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 1.0
    request = params(temperature=0.0, frequency_penalty=0.75)
    state = state_of(RowStart(1, request, 0, (1,), 1))
    row, batch = torch.tensor([1]), SamplingBatch.of([request])
    drawn = [int(sample(logits.clone(), row, torch.tensor([p]), state, batch).token_ids[0]) for p in range(1, 4)]
    assert drawn[0] == drawn[1] == 4
    assert drawn[2] != 4


def test_end_tokens_cannot_be_drawn_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 9]] = 5.0
    request = params(min_tokens=2, eos_token_ids=(3,), stop_token_ids=(9,))
    for num_output, is_blocked in ((0, True), (1, True), (2, False)):
        out = shaped(logits, request, (1,) * (4 + num_output), 4)
        assert bool(torch.isinf(out[0, [3, 9]]).all()) == is_blocked
        assert torch.isfinite(out[0, 4])


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    logits = random_logits(3)
    requests = [params(), params(num_logprobs=3, temperature=0.1, logit_bias=((1, 50.0),)), params(num_logprobs=0)]
    drawn = draw(logits, requests, [5, 5, 5])
    expected = logits.log_softmax(-1)
    assert drawn.logprobs is not None and drawn.top_ids is not None and drawn.top_logprobs is not None
    assert int(drawn.token_ids[1]) == 1
    assert torch.allclose(drawn.logprobs, expected[[1, 2], drawn.token_ids[1:]])
    assert torch.allclose(drawn.top_logprobs[0], expected[1].topk(3).values)
    assert drawn.top_ids[0].tolist() == expected[1].topk(3).indices.tolist()


def test_logits_without_a_finite_value_are_reported() -> None:
    logits = random_logits(2)
    logits[1] = math.nan
    assert draw(logits, [params(), params(temperature=0.0)], [3, 3]).is_invalid.tolist() == [False, True]


@pytest.mark.parametrize(
    "wanted",
    [{}, {"temperature": 1.0}, {"logit_bias": ((3, 50.0),)}, {"frequency_penalty": 1.0}, {"num_logprobs": 1}],
    ids=lambda wanted: next(iter(wanted), "nothing"),
)
def test_a_largest_that_is_known_is_taken_where_nothing_else_is_wanted(wanted: dict[str, Any]) -> None:
    request = params(**{"temperature": 0.0, **wanted})
    state = state_of(RowStart(1, request, 0, (1,), 1))
    found = Largest(torch.tensor([7]), torch.tensor([True]))
    logits, batch = random_logits(1), SamplingBatch.of([request])
    drawn = sample(logits, torch.tensor([1]), torch.tensor([9]), state, batch, found=found)
    assert (int(drawn.token_ids[0]) == 7 and bool(drawn.is_invalid[0])) == (not wanted)


def test_each_entry_has_its_own_log_probabilities_of_each_of_its_tokens() -> None:
    wanted = (None, 2, None, 0, 1)
    batch = SamplingBatch.of([params(num_logprobs=num_top) for num_top in wanted])
    width = 3
    asking, places = batch.repeated(width), torch.arange(3 * width)
    assert asking.with_logprobs.tolist() == [3, 4, 5, 9, 10, 11, 12, 13, 14]
    assert asking.num_top_logprobs.tolist() == [2, 2, 2, 0, 0, 0, 1, 1, 1]
    sampled = Sampled(
        torch.zeros(5 * width, dtype=torch.int64),
        torch.zeros(5 * width, dtype=torch.bool),
        logprobs=-places.float(),
        top_ids=places.unsqueeze(1) * 10 + torch.arange(2),
        top_logprobs=-places.unsqueeze(1) * 10.0 - torch.arange(2),
    )
    unpacked = unpack_logprobs(sampled, batch, width=width)
    assert unpacked.shape == (5, width)
    of_entry = dict(zip((1, 3, 4), places.view(3, width).tolist(), strict=True))
    for entry, num_top in enumerate(wanted):
        for node in range(width):
            expected = None
            if num_top is not None:
                place = of_entry[entry][node]
                top = range(num_top)
                expected = TokenLogprobs(
                    -place, tuple(10 * place + i for i in top), tuple(-10.0 * place - i for i in top)
                )
            assert unpacked[entry, node] == expected


def test_truncation_is_of_the_entries_that_ask_for_it() -> None:
    """Only the requests that ask for top_k or top_p get it, wherever they are in the batch."""
    logits = random_logits(1).expand(6, -1).contiguous()
    requests = [params(temperature=temperature) for temperature in (0.0, 50.0, 50.0, 0.0, 50.0, 50.0)]
    for entry in (2, 5):
        requests[entry] = replace(requests[entry], top_k=1)
    free, drawn = (draw(logits, each, [9] * 6, rows=[1, 2, 3, 4, 5, 6]) for each in ([requests[1]] * 6, requests))
    best = int(logits[0].argmax())
    assert best not in free.token_ids.tolist()
    assert [token == best for token in drawn.token_ids.tolist()] == [True, False, True, True, False, True]


def test_seeding_a_row_puts_no_number_of_the_hosts_into_a_table() -> None:
    state = SamplingState(max_rows=4, vocab_size=VOCAB, torch_device=CPU)
    everything = params(
        temperature=0.7, repetition_penalty=1.3, logit_bias=((3, 9.0),), min_tokens=3, eos_token_ids=(4, 5)
    )
    with RefuseHostScalars():
        state.reset([RowStart(row, everything, 0, (7, 8, 7, 9), 3) for row in (1, 2)])
    assert state.in_prompt[1].nonzero().flatten().tolist() == [7, 8]


def test_a_reused_row_remembers_nothing() -> None:
    logits = random_logits(1)
    state = state_of(RowStart(1, params(repetition_penalty=2.0, logit_bias=((3, 9.0),)), 0, (1, 2, 3), 1))
    second = params(repetition_penalty=1.5, logit_bias=((4, 1.0),))
    state.reset([RowStart(1, second, 0, (7,), 1)])
    out = shape_logits(logits.clone(), torch.tensor([1]), torch.tensor([1]), state, SamplingBatch.of([second]))
    assert torch.allclose(out, shaped(logits, second, (7,), 1))
