"""Tests of field rule C8: the network between decode and prefill is cut, without any connection being closed.

A proxy on loopback holds back all that both sides send. `python -m benchmarks.partition` does the same for 10 s with
two network namespaces, where TCP notices the silence too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from baton import Completion, errors
from baton.local_pair import LocalPair
from tests.e2e.load import Workload, assert_same, has_rows_with, load
from tests.support.black_hole import BlackHoleProxy
from tests.support.running_pair import RunningPair, is_empty, running_pair, wait_until

pytestmark = pytest.mark.thorough

WORKLOAD = Workload(prompt_tokens=300, new_tokens=12, caches=False)  # else hardly anything is handed over
TIMEOUT_S = 3.0
"""Time-out in seconds of a handoff's progress, of the wait for any replica, and of a receiver that takes nothing."""
SHORT_CUT_S = 1.0
NUM_TRIES = 5
"""How often a test tries: a row may have finished between the check and the cut."""


@pytest.fixture(scope="module")
def proxies() -> Iterator[tuple[BlackHoleProxy, ...]]:
    with ExitStack() as stack:
        yield tuple(stack.enter_context(BlackHoleProxy()) for _ in range(2))


@pytest.fixture(scope="module")
def pair(
    large_kv_model: Path, forked: Callable[..., LocalPair], proxies: Sequence[BlackHoleProxy]
) -> Iterator[RunningPair]:
    """A pair whose KV lands one 64-KiB segment at a time."""
    with running_pair(
        large_kv_model,
        kind=partial(forked, through=proxies),
        num_prefill=2,
        shared_args=("--max-rows=32", "--max-kv-tokens=8192"),
        prefill_args=(
            "--kv-transport=grpc",
            "--max-segment-bytes=65536",
            "--send-budget-bytes=262144",
            "--chunk-tokens=64",
            f"--stall-timeout-s={TIMEOUT_S}",
        ),
        decode_args=(
            "--receive-budget-bytes=1",
            "--disabled-fast-paths=prefix_routing",  # else one replica may have all prompts cached, and get all rows
            f"--prefill-timeout-s={TIMEOUT_S}",
            f"--handoff-progress-timeout-s={TIMEOUT_S}",
        ),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(pair: RunningPair) -> list[Completion]:
    return WORKLOAD.undisturbed(pair.client)


@pytest.fixture(autouse=True)
def all_is_mended_at_the_end(
    everything_is_free_at_the_end: None, pair: RunningPair, proxies: Sequence[BlackHoleProxy]
) -> Iterator[None]:
    yield
    for proxy in proxies:
        proxy.mend()
    wait_until(lambda: all(replica.is_ready for replica in pair.load().prefill_replicas), about=pair.load)


def test_rows_of_a_replica_that_fell_silent_are_computed_by_the_other(
    pair: RunningPair, proxies: Sequence[BlackHoleProxy], undisturbed: list[Completion]
) -> None:
    num_retries_before = pair.load().num_row_retries
    with load(pair.client, WORKLOAD, undisturbed, num_threads=8) as outcomes:
        wait_until(lambda: has_rows_with(pair, 0), about=pair.load)
        proxies[0].cut()
        wait_until(lambda: not pair.load().prefill_replicas[0].is_ready, about=pair.load)
        outcomes.wait_for_more()
        # A prefill replica owes nothing to a receiver that is gone, even while the cut lasts.
        wait_until(lambda: is_empty(pair.prefill_load(0)), about=pair.prefill_load)
        assert pair.is_ready()
    assert outcomes.errors == []
    assert pair.load().num_row_retries > num_retries_before


def test_while_all_are_cut_off_requests_end_in_time_and_mended_they_serve_again(
    pair: RunningPair, proxies: Sequence[BlackHoleProxy], undisturbed: list[Completion]
) -> None:
    with load(pair.client, WORKLOAD, undisturbed, num_threads=8) as outcomes:
        wait_until(lambda: has_rows_with(pair, 0) and has_rows_with(pair, 1), about=pair.load)
        for proxy in proxies:
            proxy.cut()
        wait_until(lambda: not pair.is_ready(), about=pair.load)
        wait_until(lambda: len(outcomes.errors) >= 8, about=lambda: outcomes)
        for prefill in pair.prefills:
            wait_until(lambda prefill=prefill: is_empty(prefill.load()), about=pair.prefill_load)
        for proxy in proxies:
            proxy.mend()
        outcomes.wait_for_more(16)
    assert {(type(error), error.reason) for error in outcomes.errors} == {(errors.Unavailable, "NO_PREFILL")}


def test_a_short_cut_costs_time_only(
    pair: RunningPair, proxies: Sequence[BlackHoleProxy], undisturbed: list[Completion]
) -> None:
    """The cut is shorter than any time-out. Everything held back arrives afterwards, in the same calls."""
    assert any(rows_met_by_a_cut(pair, proxies, undisturbed) > 0 for _ in range(NUM_TRIES)), "none met a row"


def rows_met_by_a_cut(pair: RunningPair, proxies: Sequence[BlackHoleProxy], undisturbed: list[Completion]) -> int:
    """Cuts the network while requests run, and asserts that all of them are served as usual, with no retry. Returns the
    number of rows that were being handed off when the cut began, or 0 if a busy machine made the cut a long one.
    """
    num_retries_before = pair.load().num_row_retries
    with WORKLOAD.at_once(pair.client) as asked:
        wait_until(lambda: has_rows_with(pair, 0) or all(each.done() for each in asked), about=pair.load)
        cut_s = time.monotonic()
        for proxy in proxies:
            proxy.cut()
        num_rows = sum(replica.num_rows for replica in pair.load().prefill_replicas)
        for proxy in proxies:
            proxy.mend()
        if time.monotonic() - cut_s > SHORT_CUT_S:
            return 0
        for each, expected in zip(asked, undisturbed, strict=True):
            assert_same(each.result(), expected)
    assert pair.load().num_row_retries == num_retries_before
    return num_rows
