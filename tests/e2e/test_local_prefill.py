"""Tests of a pair with the default settings on a CPU: the decode service computes short turns itself and hands long
ones over. A killed prefill service costs no token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton import Completion
from baton.local_pair import LocalPair
from tests.support.running_pair import BOUND_S, RunningPair, running_pair

NUM_CHATS = 3
NEW_TOKENS = 12
LONG, SHORT = 200, 15  # tokens of a turn; by default at most 128 stay in the decode service
TURNS = (LONG, SHORT, SHORT, LONG, SHORT, LONG, SHORT)
KILLED_IN_TURN = 3


@pytest.fixture(scope="module")
def pair(tiny_model_dir: Callable[[str], Path], forked: Callable[..., LocalPair]) -> Iterator[RunningPair]:
    with running_pair(
        tiny_model_dir("llama"),
        kind=forked,
        num_prefill=2,
        shared_args=("--max-kv-tokens=8192",),
        hands_all_over=False,
    ) as running:
        yield running


def complete(pair: RunningPair, prompt: list[int], *, is_cold: bool = False) -> Completion:
    return pair.client.complete(
        token_ids=prompt,
        timeout_s=BOUND_S,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        temperature=0.0,
        cache_prompt=False if is_cold else None,
    )


def test_short_turns_stay_and_long_ones_are_handed_over_while_a_prefill_service_is_killed(pair: RunningPair) -> None:
    prompts: list[list[int]] = [[] for _ in range(NUM_CHATS)]
    asked: list[tuple[list[int], list[int]]] = []
    num_handoffs: dict[int, list[int]] = {LONG: [], SHORT: []}
    with ThreadPoolExecutor(NUM_CHATS) as clients:
        for turn, size in enumerate(TURNS):
            for chat, prompt in enumerate(prompts):
                prompt += [10 + (chat * 37 + turn * 11 + place * (chat + 3)) % 240 for place in range(size)]
            streaming = [clients.submit(complete, pair, prompt) for prompt in prompts]
            if turn == KILLED_IN_TURN:
                pair.processes.prefill[0].kill()
            for prompt, answer in zip(prompts, [each.result() for each in streaming], strict=True):
                assert answer.timings is not None
                num_handoffs[size].append(answer.timings.num_handoff_attempts)
                assert answer.timings.num_cached_tokens > 0 or not 0 < turn < KILLED_IN_TURN
                asked.append((list(prompt), list(answer.token_ids)))
                prompt += answer.token_ids
    assert num_handoffs[SHORT] == [0] * TURNS.count(SHORT) * NUM_CHATS, "a short turn was handed over"
    assert min(num_handoffs[LONG]) >= 1, "a long turn was computed in the decode service"
    for prompt, answered in asked:
        assert complete(pair, prompt, is_cold=True).token_ids == tuple(answered), f"{len(prompt)} tokens"
