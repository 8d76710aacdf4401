"""Tests that a decode service whose setting is a name serves with the replicas that the name resolves to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE
from common.config.settings import DecodeSettings, PrefillSettings
from decode_service import main as decode_main
from prefill_service import main as prefill_main
from tests.support.free_ports import free_address
from tests.support.services_here import BOUND_S, serving_here


async def test_a_decode_service_is_ready_once_its_name_resolves_and_hands_over_to_what_is_behind_it(
    tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    behind: list[str] = []

    def look_up(host: str, port: int) -> list[str]:
        assert (host, port) == ("prefill", 50051)
        if not behind:
            raise OSError("nothing is behind it")
        return behind

    monkeypatch.setattr(decode_main, "look_up", look_up)
    shared: dict[str, Any] = {"model": str(tiny_model_dir("llama")), "dtype": "float32", "num_threads": 1}
    prefill = PrefillSettings(listen=free_address(), max_kv_tokens=1024, **shared)
    decode = DecodeSettings(
        listen=free_address(),
        prefill=("dns:///prefill:50051",),
        max_kv_tokens=1024,
        local_prefill_tokens=0,
        **shared,
    )
    async with (
        serving_here(prefill_main, prefill, READY_SERVICE["prefill"]),
        serving_here(decode_main, decode, READY_SERVICE["decode"]) as service,
    ):
        await service.turns(HealthStatus.NOT_SERVING)
        async with asyncio.timeout(BOUND_S):
            while True:
                (missing,) = (await service.client.load()).prefill_replicas
                assert (missing.address, missing.is_ready) == ("dns:///prefill:50051", False)
                if missing.reason != "not looked up yet":
                    break
        assert "nothing is behind it" in missing.reason

        behind.append(prefill.listen)
        await service.turns(HealthStatus.SERVING)
        served = await service.client.complete(token_ids=[10, 11], max_tokens=4, ignore_eos=True)
        assert served.timings.num_handoff_attempts == 1
        (found,) = (await service.client.load()).prefill_replicas
        assert found.address == prefill.listen
