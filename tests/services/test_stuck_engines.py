"""Tests of an engine that hangs or dies: health reports it within 5 s, every request ends with a reason, and the
service ends too.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
from structlog.testing import capture_logs

from baton import errors
from baton.events import Delta
from baton.server_info import HealthStatus
from common.device.cpu import CpuDevice
from common.errors import EngineStalled
from common.service import life
from common.service.watchdog import Watchdog
from decode_service.schedule.scheduler import DecodeEngine
from prefill_service.schedule.scheduler import PrefillEngine
from tests.support.services_here import BOUND_S, ServiceHere, pair_here, until

PATIENT_S = 600.0
"""A stall time-out in seconds that no test reaches. By default a stall ends the service before health reports it."""
STALL_S = 0.5

Tiny = Callable[[str], Path]


@asynccontextmanager
async def stuck_pair(
    tiny_model_dir: Tiny, *, prefill_stall_s: float = PATIENT_S, decode_stall_s: float = PATIENT_S
) -> AsyncIterator[tuple[ServiceHere, ServiceHere]]:
    """Yields a ready pair in this process, as (prefill, decode)."""
    async with pair_here(
        tiny_model_dir("llama"),
        prefill={"engine_stall_timeout_s": prefill_stall_s},
        decode={"engine_stall_timeout_s": decode_stall_s, "prefill_timeout_s": 1.0},
        grace_period_s=0.5,
    ) as pair:
        yield pair.prefill, pair.decode


class WatchdogsClock:
    """The time of all watchdogs. It stands until it is started, so that no pause before counts as a stall."""

    def __init__(self) -> None:
        self._began_s: float | None = None

    def start(self) -> None:
        self._began_s = time.monotonic()

    def __call__(self) -> float:
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WatchdogsClock:
    clock = WatchdogsClock()
    monkeypatch.setattr(life, "Watchdog", partial(Watchdog, clock=clock))
    return clock


@pytest.fixture
def patient_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives ended calls all the time they need for their answer: on a busy machine, the default would cut it off."""
    monkeypatch.setattr(life, "CLOSE_GRACE_S", BOUND_S)


async def generate(decode: ServiceHere) -> int:
    """Runs one long request, and returns its number of tokens."""
    num_tokens = 0
    async for event in decode.client.generate(token_ids=[10, 11, 12], max_tokens=3000, ignore_eos=True):
        if isinstance(event, Delta):
            num_tokens += len(event.token_ids)
    return num_tokens


async def decode_runs(decode: ServiceHere) -> None:
    async with asyncio.timeout(BOUND_S):
        while (await decode.client.load()).num_running == 0:  # noqa: ASYNC110 - it can only be looked at
            await asyncio.sleep(0)


def raise_cursed(_engine: object, _commands: Sequence[object]) -> NoReturn:
    """Raises an error in place of an engine's step, so that the engine dies."""
    raise RuntimeError("cursed")


async def test_a_prefill_forward_that_hangs_is_told_by_both_services(tiny_model_dir: Tiny) -> None:
    async with stuck_pair(tiny_model_dir) as (prefill, decode):
        prefill.hang.arm()
        request = asyncio.create_task(generate(decode))
        await prefill.hang.begun()
        thread = prefill.lives[0].thread
        num_steps = thread.num_steps_begun

        await asyncio.gather(prefill.turns(HealthStatus.NOT_SERVING), decode.turns(HealthStatus.NOT_SERVING))

        assert await prefill.health("") is await decode.health("") is HealthStatus.SERVING
        assert thread.num_steps_begun > num_steps, "its steps do not go on: another test's case"
        assert thread.inbox.load.num_steps == 0, "a replica whose forward hangs seems to get on"
        assert not request.done()
        prefill.hang.release()
        await decode_runs(decode)
        request.cancel()


@pytest.mark.usefixtures("patient_close")
async def test_a_prefill_forward_that_hangs_for_too_long_ends_its_calls_and_then_its_service(
    tiny_model_dir: Tiny, clock: WatchdogsClock
) -> None:
    async with stuck_pair(tiny_model_dir, prefill_stall_s=STALL_S) as (prefill, decode):
        prefill.hang.arm()
        with capture_logs() as logs:
            request = asyncio.create_task(generate(decode))
            await prefill.hang.begun()
            clock.start()
            with pytest.raises(errors.Unavailable) as ended:
                async with asyncio.timeout(BOUND_S):
                    await request
            assert ended.value.reason == "NO_PREFILL"
            lost = await prefill.lost()
        assert isinstance(lost, EngineStalled)
        assert str(lost) == f"stream forward has not moved for {STALL_S} s"
        assert f"a handoff call failed: {lost}" in [line["event"] for line in logs]
        assert not decode.serving.done()


async def test_a_decode_forward_that_hangs_is_told(tiny_model_dir: Tiny) -> None:
    async with stuck_pair(tiny_model_dir) as (_, decode):
        request = asyncio.create_task(generate(decode))
        await decode_runs(decode)
        decode.hang.arm()
        await decode.turns(HealthStatus.NOT_SERVING)
        assert await decode.health("") is HealthStatus.SERVING
        assert not request.done()
        decode.hang.release()
        await decode.turns(HealthStatus.SERVING)
        request.cancel()


@pytest.mark.usefixtures("patient_close")
async def test_a_decode_forward_that_hangs_for_too_long_ends_its_streams_and_then_the_service(
    tiny_model_dir: Tiny, clock: WatchdogsClock
) -> None:
    async with stuck_pair(tiny_model_dir, decode_stall_s=STALL_S) as (prefill, decode):
        request = asyncio.create_task(generate(decode))
        await decode_runs(decode)
        decode.hang.arm()
        await decode.hang.begun()
        clock.start()
        with pytest.raises(errors.Unavailable, match="has not moved") as ended:
            async with asyncio.timeout(BOUND_S):
                await request
        assert ended.value.reason == "ENGINE_STALLED"
        assert isinstance(await decode.lost(), EngineStalled)
        assert await prefill.health() is HealthStatus.SERVING


@pytest.mark.usefixtures("patient_close")
async def test_a_service_whose_engine_hangs_ends_by_sigterm_too_and_says_why(
    tiny_model_dir: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "ENGINE_STOP_TIMEOUT_S", 0.5)
    async with stuck_pair(tiny_model_dir) as (prefill, decode):
        request = asyncio.create_task(generate(decode))
        await decode_runs(decode)
        other = asyncio.create_task(generate(decode))
        for service in (decode, prefill):
            service.hang.arm()
        await decode.hang.begun()

        for service in (decode, prefill):
            service.terminated.set()

        for ending in (request, other):
            with pytest.raises(errors.Unavailable) as ended:
                async with asyncio.timeout(BOUND_S):
                    await ending
            assert ended.value.reason == "DRAINING"
        assert str(await decode.lost()) == "the engine did not stop"


async def test_a_prefill_engine_that_died_ends_its_calls_and_the_service(
    tiny_model_dir: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: set[str] = set()
    monkeypatch.setattr(CpuDevice, "enter_thread", lambda device: entered.add(threading.current_thread().name))
    async with stuck_pair(tiny_model_dir) as (prefill, decode):
        await until(lambda: entered == {"prefill-engine", "decode-engine"})

        monkeypatch.setattr(PrefillEngine, "step", raise_cursed)

        assert str(await prefill.lost()) == "the engine died: RuntimeError: cursed"
        await decode.turns(HealthStatus.NOT_SERVING)
        with pytest.raises(errors.Unavailable):
            async with asyncio.timeout(BOUND_S):
                await generate(decode)


@pytest.mark.usefixtures("patient_close")
async def test_a_decode_engine_that_died_ends_its_streams_and_the_service(
    tiny_model_dir: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stuck_pair(tiny_model_dir) as (_, decode):
        request = asyncio.create_task(generate(decode))
        await decode_runs(decode)

        monkeypatch.setattr(DecodeEngine, "step", raise_cursed)

        with pytest.raises(errors.Unavailable, match="cursed") as ended:
            async with asyncio.timeout(BOUND_S):
                await request
        assert ended.value.reason == "ENGINE_LOST"
        with pytest.raises((errors.Unavailable, errors.Cancelled)):  # gRPC cancels a call that meets the server's end
            await decode.client.complete(token_ids=[10], max_tokens=1)
        assert str(await decode.lost()) == "the engine died: RuntimeError: cursed"


LOST_WITH_A_THREAD_THAT_NEVER_ENDS = """
    import sys, threading
    from types import SimpleNamespace
    from common.config.settings import DecodeSettings
    from common.errors import EngineStalled
    from common.service import process, runtime

    async def serve(settings, process):
        threading.Thread(target=threading.Event().wait).start()
        print("served", end="")
        raise EngineStalled("stream forward has not moved")

    nothing = lambda: None
    runtime.open_runtime = lambda settings, other: SimpleNamespace(close=nothing, leave_role=nothing)
    sys.exit(process.run_service("decode_service", DecodeSettings, lambda: serve, []))
"""


@pytest.mark.thorough
def test_a_process_whose_engine_is_lost_ends_with_1_whatever_hangs_in_it(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOST_WITH_A_THREAD_THAT_NEVER_ENDS)],
        check=False,
        capture_output=True,
        text=True,
        timeout=5 * BOUND_S,  # a service's imports take 7 s of a core that other tests may need
    )
    assert (ended.returncode, ended.stdout) == (1, "served"), ended.stderr
    assert "stream forward has not moved" in ended.stderr
