"""Tests that on one host all KV goes through shared memory without any setting, and that killed services leave none
behind.

test_prefill_killed covers the requests of services that are killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.local_pair import LocalPair
from common.kv.shared_pool import DIRECTORY
from tests.support.reference import generate_greedily
from tests.support.running_pair import BOUND_S, RunningPair, prefill_counters, running_pair, wait_until

PROMPT = [10 + place % 240 for place in range(200)]
NEW_TOKENS = 6
ALL, LENT = "baton_handoff_bytes_total", "baton_handoff_lent_bytes_total"


@pytest.fixture(scope="module")
def model(tiny_model_dir: Callable[[str], Path]) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture(scope="module")
def pair(model: Path, forked: Callable[..., LocalPair]) -> Iterator[RunningPair]:
    with running_pair(model, kind=forked, exposes_metrics=True) as running:
        yield running


def test_every_byte_goes_through_shared_memory_and_none_is_left_by_services_that_are_killed(
    pair: RunningPair, model: Path
) -> None:
    options = {
        "max_tokens": NEW_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "timeout_s": BOUND_S,
        "cache_prompt": False,
    }
    expected = generate_greedily(model, PROMPT, NEW_TOKENS).token_ids
    before = {ALL: 0.0, LENT: 0.0}

    def is_lent() -> bool:
        completion = pair.client.complete(token_ids=PROMPT, **options)  # type: ignore[arg-type]
        assert list(completion.token_ids) == expected
        counted = prefill_counters(pair)
        num_bytes, num_lent = (counted[name] - before[name] for name in (ALL, LENT))
        before.update(counted)
        assert num_bytes == completion.timings.kv_bytes > 0
        return num_lent == num_bytes

    wait_until(is_lent)  # on a busy machine, the memory may not be given in time at first

    wait_until(pair.holds_nothing)
    for service in pair.processes.services:
        service.kill()
        assert service.wait(BOUND_S)
    assert not any(path.is_file() for path in DIRECTORY.glob("baton-kv-*")), "what is there takes memory"
