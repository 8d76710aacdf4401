"""A pair of real services on a tiny model, in this process, on an event loop of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest

from baton import Client
from baton.server_info import HealthStatus
from common.config.settings import DecodeSettings, PrefillSettings
from decode_service import main as decode_main
from prefill_service import main as prefill_main
from tests.services.services_here import free_address, serving_here
from tests.support.loop_thread import LoopThread


@contextmanager
def pair_here(loop: LoopThread, model: Path) -> Iterator[Client]:
    """A client of its decode service."""
    common = {
        "model": str(model),
        "dtype": "float32",
        "num_threads": 1,
        "max_kv_tokens": 8192,
        "fused_forward": False,  # answers are compared more closely than kernels, once they are there, agree with it
        "debug_checks": True,
    }
    prefill = PrefillSettings(listen=free_address(), **common)  # type: ignore[arg-type]
    decode = DecodeSettings(listen=free_address(), prefill=(prefill.listen,), **common)  # type: ignore[arg-type]
    stack = AsyncExitStack()

    async def start(patch: pytest.MonkeyPatch) -> None:
        await stack.enter_async_context(serving_here(prefill_main, prefill, "baton.v1.Prefill", patch))
        service = await stack.enter_async_context(serving_here(decode_main, decode, "baton.v1.Inference", patch))
        await service.turns(HealthStatus.SERVING)

    try:
        with pytest.MonkeyPatch.context() as patch:  # what is patched is read while they start
            loop.run(start(patch))
        with Client(decode.listen) as client:
            yield client
    finally:
        loop.run(stack.aclose())
