"""Tests of a pair whose KV goes through NIXL: every byte goes that way, and if a process is killed, either a service or
the one that hosts NIXL, requests are retried and no token is lost.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from baton import Completion
from baton.local_pair import LocalPair
from baton.service_process import ServiceProcess
from common.nixl import transfer_process
from tests.e2e.load import Workload, tokens
from tests.support.running_pair import BOUND_S, RunningPair, prefill_counters, running_pair, wait_until

pytestmark = pytest.mark.thorough

WORKLOAD = Workload(prompt_tokens=300, new_tokens=6, num_kinds=6, caches=False)
ALL, LENT = "baton_handoff_bytes_total", "baton_handoff_lent_bytes_total"


@pytest.fixture(scope="module")
def pair(large_kv_model: Path, forked: Callable[..., LocalPair]) -> Iterator[RunningPair]:
    with running_pair(
        large_kv_model,
        kind=forked,
        num_prefill=2,
        shared_args=("--max-kv-tokens=8192",),
        prefill_args=("--kv-transport=nixl", "--chunk-tokens=64"),
        exposes_metrics=True,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(pair: RunningPair) -> list[Completion]:
    return WORKLOAD.undisturbed(pair.client)


def nixl_of(service: ServiceProcess) -> list[psutil.Process]:
    """Returns the service's processes that host NIXL, once there are any: one for a prefill service, and one per
    replica in use for a decode service.
    """
    found: list[psutil.Process] = []

    def are_there() -> bool:
        children = psutil.Process(service.pid).children()
        found[:] = [child for child in children if not has_ended(child) and transfer_process.__name__ in command(child)]
        return bool(found)

    wait_until(are_there)
    return found


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # also raised for a zombie
        return []


def has_ended(process: psutil.Process) -> bool:
    """Returns whether the process has ended, even if its parent has not noticed yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_every_byte_goes_through_nixl(pair: RunningPair, undisturbed: list[Completion]) -> None:
    assert [completion.timings.num_handoff_attempts for completion in undisturbed] == [1] * WORKLOAD.num_kinds
    num_bytes = sum(completion.timings.kv_bytes for completion in undisturbed)
    assert prefill_counters(pair)[ALL] == prefill_counters(pair)[LENT] == num_bytes > 0


def test_a_prefill_service_that_is_killed_takes_its_process_along_and_its_rows_are_read_from_the_other(
    pair: RunningPair, undisturbed: list[Completion]
) -> None:
    victim, _ = pair.processes.prefill
    (nixl,) = nixl_of(victim)
    before = prefill_counters(pair)[LENT]
    with WORKLOAD.at_once(pair.client) as completions:
        wait_until(lambda: prefill_counters(pair)[LENT] > before)
        os.kill(victim.pid, signal.SIGKILL)
        assert tokens(completions) == [completion.token_ids for completion in undisturbed]
    assert victim.wait(BOUND_S)
    wait_until(lambda: has_ended(nixl))


def test_requests_go_on_where_the_processes_that_nixl_lives_in_are_killed(
    pair: RunningPair, undisturbed: list[Completion]
) -> None:
    (decode,), (_, prefill) = pair.processes.decode, pair.processes.prefill
    victims = [*nixl_of(decode), *nixl_of(prefill)]
    with WORKLOAD.at_once(pair.client) as completions:
        wait_until(lambda: pair.load().rows.transferring > 0 or all(each.done() for each in completions))
        for victim in victims:
            with suppress(psutil.NoSuchProcess):  # the end of one may also end its peer
                victim.kill()
        assert tokens(completions) == [completion.token_ids for completion in undisturbed]
    assert decode.is_running and prefill.is_running
