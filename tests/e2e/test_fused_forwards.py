"""Both services once their forwards are fused: the tokens are those of `generate`, however a prompt was cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.full_speed import await_fused
from baton.local_pair import LocalPair
from tests.e2e.running import BOUND_S, COMMON_ARGS, RunningPair, clients_of
from tests.support.reference import generate_greedily

NEW_TOKENS = 8
CHUNK_TOKENS = 48
PROMPTS = {length: [4 + (number * number + length) % 250 for number in range(length)] for length in (5, 47, 130, 70)}


@pytest.fixture(scope="module")
def pair(tiny_model_dir: Callable[[str], Path], forked: Callable[..., LocalPair]) -> Iterator[RunningPair]:
    processes = forked(
        model=str(tiny_model_dir("llama")),
        dtype="float32",
        prefill_args=(*COMMON_ARGS, f"--chunk-tokens={CHUNK_TOKENS}"),
        decode_args=COMMON_ARGS,
        exposes_metrics=True,
    )
    with processes, clients_of(processes) as running:
        yield running


def test_tokens_are_those_of_generate(pair: RunningPair, tiny_model_dir: Callable[[str], Path]) -> None:
    assert await_fused(pair.processes.metrics_addresses, timeout_s=2 * BOUND_S)  # compiled, where nobody did yet

    def ask(prompt: list[int]) -> tuple[int, ...]:
        options = {"max_tokens": NEW_TOKENS, "temperature": 0.0}
        return pair.client.complete(token_ids=prompt, timeout_s=BOUND_S, **options).token_ids

    with ThreadPoolExecutor(len(PROMPTS)) as pool:  # at once, so that chunks of several prompts meet
        answers = dict(zip(PROMPTS, pool.map(ask, PROMPTS.values()), strict=True))
    expected = {
        length: tuple(generate_greedily(tiny_model_dir("llama"), prompt, NEW_TOKENS).token_ids)
        for length, prompt in PROMPTS.items()
    }
    assert answers == expected
