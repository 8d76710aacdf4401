"""A pair of real services on a tiny model, in this process, on an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from baton import Client
from baton.server_info import HealthStatus
from common.config.settings import DecodeSettings, PrefillSettings
from decode_service import main as decode_main
from prefill_service import main as prefill_main
from tests.support.loop_thread import LoopThread
from tests.support.services_here import LOOK_INTERVAL_S, free_address, serving_here

FUSED_BOUND_S = 120.0  # kernels are compiled where none are kept


@contextmanager
def pair_here(loop: LoopThread, model: Path) -> Iterator[Client]:
    """A client of its decode service."""
    common = {
        "model": str(model),
        "dtype": "float32",
        "num_threads": 1,
        "max_kv_tokens": 8192,
        "debug_checks": True,
    }
    prefill = PrefillSettings(listen=free_address(), **common)  # type: ignore[arg-type]
    decode = DecodeSettings(listen=free_address(), prefill=(prefill.listen,), **common)  # type: ignore[arg-type]
    stack = AsyncExitStack()

    async def start() -> None:
        first = await stack.enter_async_context(serving_here(prefill_main, prefill, "baton.v1.Prefill"))
        service = await stack.enter_async_context(serving_here(decode_main, decode, "baton.v1.Inference"))
        await service.turns(HealthStatus.SERVING)
        async with asyncio.timeout(FUSED_BOUND_S):  # answers are compared more closely than these agree with operators
            while not (first.model.runs_program and service.model.runs_program):  # noqa: ASYNC110 - threads set it
                await asyncio.sleep(LOOK_INTERVAL_S)

    try:
        loop.run(start())
        with Client(decode.listen) as client:
            yield client
    finally:
        loop.run(stack.aclose())
