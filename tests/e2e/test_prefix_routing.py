"""Tests that real prefill services report what they evict, and that a conversation returns to the service that has its
beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.local_pair import LocalPair
from tests.support.running_pair import BOUND_S, RunningPair, running_pair, wait_until

pytestmark = pytest.mark.thorough

PROMPT_TOKENS = 80


@pytest.fixture(scope="module")
def pair(tiny_model_dir: Callable[[str], Path], forked: Callable[..., LocalPair]) -> Iterator[RunningPair]:
    with running_pair(
        tiny_model_dir("llama"), kind=forked, num_prefill=2, shared_args=("--max-kv-tokens=512",)
    ) as running:
        yield running


def num_cached(pair: RunningPair, number: int, num_tokens: int) -> int:
    """Sends the first `num_tokens` tokens of text `number` as a prompt, and returns how many were cached. The texts
    differ from their first token on.
    """
    text = [10 + number, *range(20, 20 + num_tokens - 1)]
    timings = pair.client.complete(token_ids=text, max_tokens=1, timeout_s=BOUND_S).timings
    assert timings is not None
    return timings.num_cached_tokens


def known_and_cached(pair: RunningPair) -> list[tuple[int, int]]:
    """Returns for each prefill service how many tokens the decode service believes it has cached, and how many it
    has.
    """
    known = [replica.num_known_tokens for replica in pair.load().prefill_replicas]
    return list(zip(known, [client.load().slots.cached for client in pair.prefills], strict=True))


def test_turns_go_where_their_conversation_is_until_it_is_evicted_or_the_process_ends(pair: RunningPair) -> None:
    assert [num_cached(pair, number, PROMPT_TOKENS) for number in (0, 1)] == [0, 0]
    wait_until(pair.holds_nothing)
    assert known_and_cached(pair) == [(PROMPT_TOKENS, PROMPT_TOKENS)] * 2
    for number in (1, 0, 1, 0):
        assert num_cached(pair, number, PROMPT_TOKENS + 20) >= PROMPT_TOKENS
    for number in range(2, 20):
        num_cached(pair, number, PROMPT_TOKENS)
    wait_until(
        lambda: pair.holds_nothing() and all(300 < known <= cached <= 512 for known, cached in known_and_cached(pair)),
        about=lambda: known_and_cached(pair),
    )
    pair.processes.prefill[1].kill()
    assert pair.processes.prefill[1].wait(BOUND_S)
    pair.processes.prefill[1].start()
    wait_until(lambda: known_and_cached(pair)[1] == (0, 0), about=lambda: known_and_cached(pair))
    assert known_and_cached(pair)[0][0] > 300, "the other one is the same"
