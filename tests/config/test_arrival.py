"""Tests that the values of settings arrive at the components that use them. The components' own tests show what they do
with these values.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
from prometheus_client import CollectorRegistry

from common.config.fast_paths import FastPath
from common.config.settings import DecodeSettings, PrefillSettings, ServiceSettings
from common.kv.pool_size import PoolSize
from common.role import Role
from common.sampling.triton_draws import TritonDraws
from common.service import runtime
from common.service.process import Process
from common.service.roles import RoleSwitch
from decode_service import main as decode_main
from decode_service.edge import assembly
from decode_service.schedule.config import DecodeConfig
from decode_service.speculate.depth import AdaptiveDepth, Depth, FixedDepth
from decode_service.speculate.spec_info import SpecInfo
from prefill_service import main as prefill_main
from tests.support.engines import Received

KINDS: dict[ModuleType, type[ServiceSettings]] = {decode_main: DecodeSettings, prefill_main: PrefillSettings}


class Made(Exception):
    """Raised in place of building a component. It carries the argument that the component would get."""


def _without(path: FastPath) -> dict[str, Any]:
    return {"disabled_fast_paths": (path,)}


ARRIVALS: list[tuple[ModuleType, dict[str, Any], str, str, Any, Any]] = [
    (decode_main, _without(FastPath.OVERLAP), "DecodeEngine", "overlap", True, False),
    (decode_main, _without(FastPath.CUDA_GRAPHS), "DecodeEngine", "replays_forwards", True, False),
    (decode_main, {"max_handoff_attempts": 7}, "DecodeEngine", "max_handoff_attempts", 3, 7),
    (decode_main, _without(FastPath.PARALLEL_CONNECTIONS), "GrpcTransport", "num_channels_per_replica", 2, 1),
    (assembly, {"max_streams": 2000}, "ServerLimits", "max_streams", 1024, 2000),
    (assembly, {"max_rows": 2, "max_queued_requests": 1598}, "ServerLimits", "max_streams", 1024, 2000),
    (assembly, {"client_stall_timeout_s": 7.0}, "Served", "client_stall_timeout_s", 60.0, 7.0),
    (prefill_main, _without(FastPath.OVERLAP), "PrefillEngine", "overlap", True, False),
    (prefill_main, _without(FastPath.EARLY_SENDING), "PrefillEngine", "early_sending", True, False),
    (prefill_main, {"max_streams": 5}, "ServerLimits", "max_streams", 1024, 5),
]
"""The module that builds a service or its edge, settings, the component that it builds, and a keyword argument of that
component. Then the argument's values: by default, and with these settings.
"""

ArgumentOf = Callable[..., Awaitable[Any]]


@pytest.fixture
def argument_of(tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> ArgumentOf:
    """A function that assembles a service with the given settings until it builds a component, and returns an argument
    that the component would get.
    """
    monkeypatch.setattr(runtime, "new_fusing", lambda *_, **__: lambda check: None)

    async def argument_of(module: Any, component: str, argument: str, **options: Any) -> Any:
        def make(*values: Any, **arguments: Any) -> None:
            of_values = [getattr(value, argument) for value in values if hasattr(value, argument)]
            raise Made(arguments[argument] if argument in arguments else of_values[0])

        monkeypatch.setattr(module, component, make)
        main = decode_main if module is assembly else module
        model = str(tiny_model_dir("llama"))
        settings = KINDS[main](model=model, dtype="float32", num_threads=1, max_kv_tokens=256, **options)
        opened = runtime.open_runtime(settings)
        process = Process(
            instance_id="a", runtime=opened, registry=CollectorRegistry(), switch=RoleSwitch([Role.DECODE])
        )
        try:
            with pytest.raises(Made) as made:
                async with main.assembled(settings, process):
                    pass
        finally:
            opened.close()
            opened.device.close(5.0)
        return made.value.args[0]

    return argument_of


@pytest.mark.parametrize(("main", "options", "component", "argument", "default", "changed"), ARRIVALS)
async def test_a_setting_arrives_at_its_component(
    main: Any,
    options: dict[str, Any],
    component: str,
    argument: str,
    default: Any,
    changed: Any,
    argument_of: ArgumentOf,
) -> None:
    assert await argument_of(main, component, argument) == default
    assert await argument_of(main, component, argument, **options) == changed


async def test_the_number_of_edge_processes_arrives(argument_of: ArgumentOf) -> None:
    assert await argument_of(decode_main, "EdgeProcesses", "num", edge_processes=3) == 3


@pytest.mark.parametrize(
    ("main", "engine"), [(decode_main, "DecodeEngine"), (prefill_main, "PrefillEngine")], ids=["decode", "prefill"]
)
async def test_an_engine_draws_with_what_was_chosen(
    main: Any, engine: str, argument_of: ArgumentOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = TritonDraws()
    monkeypatch.setattr(runtime, "new_draw_kernels", lambda kind, **device: chosen)
    assert await argument_of(main, engine, "draw_kernels") is chosen


@pytest.mark.parametrize(("adapts", "kind"), [(True, AdaptiveDepth), (False, FixedDepth)])
def test_the_depth_of_drafts_adapts_unless_it_is_told_not_to(
    adapts: bool, kind: type[Depth], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(config: DecodeConfig, *_: Any, **__: Any) -> None:
        raise Made(config.new_depth(config.spec_info))

    monkeypatch.setattr(decode_main, "DecodeEngine", make)
    monkeypatch.setattr(decode_main, "speculation_of", lambda settings, draft: SpecInfo(2, 2, 1))
    process = Process(
        instance_id="a", runtime=MagicMock(), registry=CollectorRegistry(), switch=RoleSwitch([Role.DECODE])
    )
    size = PoolSize(max_rows=4, max_kv_tokens=256, max_window_tokens=0, max_context_tokens=128, decided_by="the test")
    settings = DecodeSettings(adaptive_depth=adapts)
    config = decode_main.engine_config(settings, MagicMock())
    with pytest.raises(Made) as made:
        decode_main.new_engine(settings, process, config, size, outbox=Received(), on_step=lambda stats: None)
    assert isinstance(made.value.args[0], kind)
