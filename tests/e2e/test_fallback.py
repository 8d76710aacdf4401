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
from tests.e2e.load import Workload, kill
from tests.support.running_pair import RunningPair, running_pair, stopped, wait_until

pytestmark = pytest.mark.thorough

NUM_REQUESTS = 6
WORKLOAD = Workload(prompt_tokens=300, new_tokens=160, num_kinds=2 * NUM_REQUESTS, caches=False)


@pytest.fixture(scope="module")
def pair(tiny_model_dir: Callable[[str], Path], forked: Callable[..., LocalPair]) -> Iterator[RunningPair]:
    with running_pair(
        tiny_model_dir("llama"),
        kind=forked,
        shared_args=("--max-kv-tokens=8192",),
        decode_args=("--prefill-fallback", "--prefill-timeout-s=1"),
    ) as running:
        yield running


def num_attempts(completions: list[Completion]) -> set[int]:
    return {completion.timings.num_handoff_attempts for completion in completions}


def test_long_prompts_are_answered_while_prefill_is_gone_and_handed_over_when_it_is_back(pair: RunningPair) -> None:
    expected = [completion.token_ids for completion in WORKLOAD.undisturbed(pair.client)]
    (victim,) = pair.processes.prefill
    with ThreadPoolExecutor(2 * NUM_REQUESTS) as clients:
        with stopped(victim):
            streaming = [clients.submit(WORKLOAD.complete, pair.client, number) for number in range(NUM_REQUESTS)]
            wait_until(lambda: pair.load().prefill_replicas[0].num_rows > 0, about=pair.load)
            kill(victim)
        wait_until(lambda: pair.load().is_degraded, about=pair.load)
        late = [
            clients.submit(WORKLOAD.complete, pair.client, number) for number in range(NUM_REQUESTS, 2 * NUM_REQUESTS)
        ]
        assert [each.result().token_ids for each in streaming] == expected[:NUM_REQUESTS]
        assert [each.result().token_ids for each in late] == expected[NUM_REQUESTS:]
        assert num_attempts([each.result() for each in late]) == {0}, "somebody computed them, and it was not prefill"
    wait_until(pair.is_ready, about=pair.load)  # the pair serves, so it is ready

    victim.start()
    wait_until(lambda: not pair.load().is_degraded, about=pair.load)

    def are_handed_over() -> bool:
        again = [WORKLOAD.complete(pair.client, number) for number in range(2)]
        assert [each.token_ids for each in again] == expected[:2]
        return num_attempts(again) == {1}

    wait_until(are_handed_over, about=pair.load)
