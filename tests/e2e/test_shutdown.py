"""After SIGTERM, running requests may finish within the grace period, new ones are refused, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton import errors
from baton.events import Delta
from baton.local_pair import LocalPair
from baton.server_info import HealthStatus
from baton.service_process import ServiceProcess
from tests.support.running_pair import BOUND_S, RunningPair, running_pair, wait_until

pytestmark = pytest.mark.thorough

NUM_TOKENS = 100
GRACE_S = 10
"""Grace period in seconds: enough for NUM_TOKENS, which take a fifth of a second where nothing else runs."""


@pytest.fixture(scope="module")
def pair(tiny_model_dir: Callable[[str], Path], forked: Callable[..., LocalPair]) -> Iterator[RunningPair]:
    with running_pair(tiny_model_dir("llama"), kind=forked, decode_args=[f"--grace-period-s={GRACE_S}"]) as running:
        yield running


def exit_status(service: ServiceProcess) -> int:
    assert service.wait(BOUND_S)
    with pytest.raises(errors.ServiceDied) as died:
        service.check()
    with pytest.raises(ProcessLookupError):  # nor is any process left that it started
        os.killpg(service.pid, 0)
    return died.value.returncode


def test_sigterm_refuses_what_is_new_and_ends_what_runs_by_itself_or_with_the_grace_period(pair: RunningPair) -> None:
    (decode,), (prefill,) = pair.processes.decode, pair.processes.prefill
    running = pair.client.generate(token_ids=[10, 11], max_tokens=NUM_TOKENS, ignore_eos=True)
    num_tokens = len(next(event for event in running if isinstance(event, Delta)).token_ids)
    os.kill(prefill.pid, signal.SIGSTOP)  # prompts handed to it now do not finish
    with ThreadPoolExecutor(1) as other:
        endless = other.submit(pair.client.complete, token_ids=[12, 13], timeout_s=BOUND_S)
        wait_until(lambda: pair.load().prefill_replicas[0].num_rows == 1, about=pair.load)

        decode.terminate()

        refusals: list[errors.BatonError] = []

        def is_draining() -> bool:
            try:
                next(pair.client.generate(token_ids=[14], max_tokens=1, timeout_s=0.5))
            except errors.Unavailable as error:
                refusals.append(error)
            return bool(refusals)

        wait_until(is_draining)
        assert refusals[0].reason == "DRAINING"
        wait_until(lambda: not pair.is_ready())
        assert pair.client.health("") is HealthStatus.SERVING
        num_tokens += sum(len(event.token_ids) for event in running if isinstance(event, Delta))
        assert num_tokens == NUM_TOKENS
        error = endless.exception()
    assert isinstance(error, errors.Unavailable)
    assert error.reason == "DRAINING"
    assert exit_status(decode) == 0
    events = [json.loads(line)["event"] for line in decode.log_file.read_text().splitlines()]
    assert (events[0], events[-1]) == ("config", "stopped")

    os.kill(prefill.pid, signal.SIGCONT)
    wait_until(pair.holds_nothing, about=pair.prefill_load)
    prefill.terminate()
    assert exit_status(prefill) == 0
