"""Tests that connections to a decode service are replaced from time to time, so that clients of a name resolve it
again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from common.config.settings import DecodeSettings
from decode_service import main as decode_main
from decode_service.edge import assembly
from tests.support.free_ports import free_address
from tests.support.services_here import BOUND_S, serving_here


async def test_a_connection_is_replaced_after_its_age(
    tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "CONNECTION_AGE_S", 0.1)
    settings = DecodeSettings(
        model=str(tiny_model_dir("llama")), dtype="float32", num_threads=1, max_kv_tokens=4096, listen=free_address()
    )
    async with (
        serving_here(decode_main, settings, "baton.v1.Inference"),
        grpc.aio.insecure_channel(settings.listen) as channel,
        asyncio.timeout(BOUND_S),
    ):
        await channel.channel_ready()
        await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
