"""Tests that a pair whose prefill process is killed goes on, slowly, if its decode service may compute prompts
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton import Completion
from baton.local_pair import LocalPair
from tests.support.running_pair import BOUND_S, RunningPair, running_pair, wait_until

NUM_REQUESTS = 6
PROMPT_TOKENS = 300
NEW_TOKENS = 160
KILL_BOUND_S = 10.0


@pytest.fixture(scope="module")
def pair(tiny_model_dir: Callable[[str], Path], forked: Callable[..., LocalPair]) -> Iterator[RunningPair]:
    with running_pair(
        tiny_model_dir("llama"),
        kind=forked,
        shared_args=("--max-kv-tokens=8192",),
        decode_args=("--prefill-fallback", "--prefill-timeout-s=1"),
    ) as running:
        yield running


def prompt(number: int) -> list[int]:
    return [10 + (number * 37 + place * (number + 3)) % 240 for place in range(PROMPT_TOKENS + number)]


def complete(pair: RunningPair, number: int) -> Completion:
    """Sends request `number`, which finds nothing in the prefix cache. Every other request is greedy."""
    return pair.client.complete(
        token_ids=prompt(number),
        timeout_s=BOUND_S,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        temperature=0.0 if number % 2 else 0.9,
        seed=number,
        cache_prompt=False,
    )


def num_attempts(completions: list[Completion]) -> set[int]:
    return {completion.timings.num_handoff_attempts for completion in completions}


def test_long_prompts_are_answered_while_prefill_is_gone_and_handed_over_when_it_is_back(pair: RunningPair) -> None:
    expected = [complete(pair, number).token_ids for number in range(2 * NUM_REQUESTS)]
    (victim,) = pair.processes.prefill
    with ThreadPoolExecutor(2 * NUM_REQUESTS) as clients:
        streaming = [clients.submit(complete, pair, number) for number in range(NUM_REQUESTS)]
        wait_until(lambda: pair.load().num_running > 0, about=pair.load)
        victim.kill()
        assert victim.wait(KILL_BOUND_S)
        wait_until(lambda: pair.load().is_degraded, about=pair.load)
        late = [clients.submit(complete, pair, number) for number in range(NUM_REQUESTS, 2 * NUM_REQUESTS)]
        assert [each.result().token_ids for each in streaming] == expected[:NUM_REQUESTS]
        assert [each.result().token_ids for each in late] == expected[NUM_REQUESTS:]
        assert num_attempts([each.result() for each in late]) == {0}, "somebody computed them, and it was not prefill"
    assert pair.is_ready(), "the pair serves, so it is ready"

    victim.start()
    wait_until(lambda: not pair.load().is_degraded, about=pair.load)
    again = [complete(pair, number) for number in range(2)]
    assert num_attempts(again) == {1}
    assert [each.token_ids for each in again] == expected[:2]
