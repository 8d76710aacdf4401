"""Tests of a decode service that finds its replicas through a name. A new replica gets rows, and the rows of a killed
one continue elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from baton import Completion
from baton.local_pair import LocalPair
from baton.requests import SamplingOptions
from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE
from common.config.fast_paths import FastPath
from common.config.settings import DecodeSettings
from decode_service import main as decode_main
from tests.support.free_ports import free_address
from tests.support.running_pair import BOUND_S, RunningPair, running_pair, wait_until
from tests.support.services_here import LOOK_INTERVAL_S, ServiceHere, serving_here

NUM_REQUESTS = 8
SAMPLING: SamplingOptions = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.9}


@pytest.fixture(scope="module")
def pair(tiny_model_dir: Callable[[str], Path], forked: Callable[..., LocalPair]) -> Iterator[RunningPair]:
    """A pair whose decode service is configured with both replicas."""
    with running_pair(tiny_model_dir("llama"), kind=forked, num_prefill=2) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(pair: RunningPair) -> list[tuple[int, ...]]:
    return [pair.client.complete(token_ids=[10 + i] * 60, seed=i, **SAMPLING).token_ids for i in range(NUM_REQUESTS)]


class Finding:
    """A decode service in this process, and the hosts to which its configured name resolves."""

    def __init__(self, service: ServiceHere, behind: list[str]) -> None:
        self.service = service
        self.behind = behind

    async def replicas(self) -> dict[str, bool]:
        """Returns the replicas that the decode service knows, and whether each is ready."""
        return {each.address: each.is_ready for each in (await self.service.client.load()).prefill_replicas}

    async def finds(self, *addresses: str) -> None:
        """Waits until exactly these replicas are known and ready."""
        async with asyncio.timeout(BOUND_S):
            while await self.replicas() != dict.fromkeys(addresses, True):  # noqa: ASYNC110 - it can only be looked at
                await asyncio.sleep(LOOK_INTERVAL_S)

    async def each_has_rows(self) -> None:
        """Waits until every replica holds rows of this service."""
        async with asyncio.timeout(BOUND_S):
            while not all(  # noqa: ASYNC110 - it can only be looked at
                replica.num_rows for replica in (await self.service.client.load()).prefill_replicas
            ):
                await asyncio.sleep(LOOK_INTERVAL_S)

    def begin(self) -> list[asyncio.Task[Completion]]:
        return [
            asyncio.create_task(
                self.service.client.complete(token_ids=[10 + i] * 60, seed=i, timeout_s=BOUND_S, **SAMPLING)
            )
            for i in range(NUM_REQUESTS)
        ]


@pytest.fixture
async def finding(pair: RunningPair, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Finding]:
    behind: list[str] = []

    def look_up(host: str, port: int) -> list[str]:
        assert (host, port) == ("prefill", 50051)
        if not behind:
            raise OSError("nothing is behind it")
        return list(behind)

    monkeypatch.setattr(decode_main, "look_up", look_up)
    settings = DecodeSettings(
        model=pair.client.model_info().model,
        dtype="float32",
        listen=free_address(),
        prefill=("dns:///prefill:50051",),
        num_threads=1,
        max_kv_tokens=8192,
        local_prefill_tokens=0,
        handoff_progress_timeout_s=5.0,
        disabled_fast_paths=(FastPath.PREFIX_ROUTING,),  # the replica that has all prompts would get all rows
    )
    async with serving_here(decode_main, settings, READY_SERVICE["decode"]) as service:
        await service.turns(HealthStatus.NOT_SERVING)
        yield Finding(service, behind)


async def test_replicas_behind_a_name_come_and_go_under_load_and_no_request_is_lost(
    pair: RunningPair, undisturbed: list[tuple[int, ...]], finding: Finding
) -> None:
    first, second = pair.processes.prefill
    (missing,) = (await finding.service.client.load()).prefill_replicas
    assert (missing.address, missing.is_ready) == ("dns:///prefill:50051", False)
    assert "nothing is behind it" in missing.reason

    finding.behind.append(first.address)
    await finding.finds(first.address)
    await finding.service.turns(HealthStatus.SERVING)
    assert [each.token_ids for each in await asyncio.gather(*finding.begin())] == undisturbed

    finding.behind.append(second.address)
    await finding.finds(first.address, second.address)
    os.kill(first.pid, signal.SIGSTOP)
    os.kill(second.pid, signal.SIGSTOP)
    requests = finding.begin()
    await finding.each_has_rows()

    finding.behind.remove(first.address)
    first.kill()
    os.kill(second.pid, signal.SIGCONT)
    completions = await asyncio.gather(*requests)
    assert [each.token_ids for each in completions] == undisturbed
    assert any(each.timings.num_handoff_attempts > 1 for each in completions)
    await finding.finds(second.address)
    assert (await finding.service.client.load()).num_row_retries > 0

    first.start()
    wait_until(lambda: all(replica.is_ready for replica in pair.load().prefill_replicas))
