"""Tests of the fast paths of forwards and start-up in either service. Each has a name that switches it off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs
from torch import Tensor

from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE
from baton.v1 import prefill_pb2, prefill_pb2_grpc
from baton_cpu.blocks.norm import CpuRMSNorm
from baton_cpu.compiler import kernel_cache
from baton_cpu.compiler.kernel_cache import kernels_dir
from baton_cpu.kv_copy import copy_kv
from common.attention.torch_attention import TorchAttention
from common.checkpoints.cache import kernels_cache_dir
from common.config.fast_paths import FastPath
from common.config.settings import DecodeSettings, PrefillSettings, Role, ServiceSettings
from common.cpu_engine import CpuEngine
from common.draft.paged_head import PagedHead
from common.errors import StartupError
from common.kv.pool_size import PoolSize
from common.model.target import TargetModel
from common.sampling.triton_draws import TritonDraws
from common.service import process, runtime
from common.service.process import Process, Serve, run_service
from common.service.program import EXIT_STARTUP
from common.service.roles import RoleSwitch
from common.service.work_beside import Check, Work
from decode_service.main import new_engine
from prefill_service import main as prefill_main
from tests.support.free_ports import free_address
from tests.support.services_here import serving_here

SIZE = PoolSize(max_rows=4, max_kv_tokens=256, max_window_tokens=0, max_context_tokens=128, decided_by="the test")
BOTH = [PrefillSettings, DecodeSettings]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each model that is to get fused forwards, the largest number of tokens in one forward."""
    seen: list[int] = []

    def new_fusing(
        engine: CpuEngine, model: TargetModel, draft: PagedHead | None, *, num_threads: int, max_tokens: int
    ) -> None:
        assert model.new_decoder is not None
        seen.append(max_tokens)

    monkeypatch.setattr(runtime, "new_fusing", new_fusing)
    return seen


@pytest.mark.parametrize(
    ("disabled", "expected"),
    [
        ((), ["populate", "fuse"]),
        ((FastPath.FUSED_FORWARDS,), ["populate"]),
        ((FastPath.PREFAULTED_POOL,), ["fuse"]),
        ((FastPath.PREFAULTED_POOL, FastPath.FUSED_FORWARDS), []),
    ],
    ids=str,
)
def test_the_pool_is_populated_beside_serving_before_forwards_are_fused(
    disabled: tuple[FastPath, ...],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_model_dir: Callable[[str], Path],
) -> None:
    done: list[str] = []
    have_begun = threading.Semaphore(0)

    def work(name: str) -> Work:
        def run(_check: Check) -> None:
            done.append(name)
            have_begun.release()

        return run

    monkeypatch.setattr(runtime, "new_fusing", lambda *_, **__: work("fuse"))
    model = str(tiny_model_dir("llama"))
    settings = DecodeSettings(model=model, dtype="float32", num_threads=1, disabled_fast_paths=disabled)
    opened = runtime.open_runtime(settings)
    assert done == []
    opened.start_beside(work("populate"))
    for _ in expected:
        assert have_begun.acquire(timeout=20.0)
    opened.close()
    opened.device.close(5.0)
    assert done == expected


def test_a_pool_that_cannot_be_populated_is_told_and_forwards_are_fused(
    monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Callable[[str], Path]
) -> None:
    is_fused = threading.Event()
    monkeypatch.setattr(runtime, "new_fusing", lambda *_, **__: lambda check: is_fused.set())
    opened = runtime.open_runtime(DecodeSettings(model=str(tiny_model_dir("llama")), dtype="float32", num_threads=1))

    def populate(_check: Check) -> None:
        raise OSError("not here")

    with capture_logs() as logs:
        opened.start_beside(populate)
        assert is_fused.wait(20.0)
        opened.close()
    opened.device.close(5.0)
    assert [(line["event"], line.get("error")) for line in logs] == [("kv_pool_not_populated", "not here")]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "options", [{"disabled_fast_paths": (FastPath.FUSED_FORWARDS,)}, {"attention": "torch"}], ids=str
)
def test_forwards_are_not_fused_where_a_setting_says_so(
    kind: type[ServiceSettings], options: dict[str, Any], begun: list[int], tiny_model_dir: Callable[[str], Path]
) -> None:
    """A fused kernel includes attention, so it cannot be used when attention runs on PyTorch operators."""
    model = str(tiny_model_dir("llama"))
    opened = runtime.open_runtime(kind(model=model, dtype="float32", num_threads=1, **options))
    opened.device.close(5.0)
    assert begun == [] and opened.model.new_decoder is None
    assert isinstance(opened.model.attention, TorchAttention) == ("attention" in options)


def test_what_a_service_may_put_into_a_forward_is_fused(
    begun: list[int], tiny_model_dir: Callable[[str], Path]
) -> None:
    model = str(tiny_model_dir("llama"))
    settings = PrefillSettings(model=model, dtype="float32", num_threads=1, chunk_tokens=16, max_batch_tokens=700)
    runtime.open_runtime(settings).device.close(5.0)
    runtime.open_runtime(DecodeSettings(model=model, dtype="float32", num_threads=1)).device.close(5.0)
    assert begun == [700, 512]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("keeps", [True, False])
def test_kernels_are_kept_in_the_users_cache(
    kind: type[ServiceSettings],
    keeps: bool,
    begun: list[int],
    tiny_model_dir: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_cache._Cache, "directory", None)
    disabled = () if keeps else (FastPath.KERNEL_CACHE,)
    model = str(tiny_model_dir("llama"))
    settings = kind(model=model, dtype="float32", num_threads=1, disabled_fast_paths=disabled)
    runtime.open_runtime(settings).device.close(5.0)
    assert kernels_dir() == (kernels_cache_dir() if keeps else None)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("optimized", [True, False])
def test_modules_are_optimized(
    kind: type[ServiceSettings], optimized: bool, begun: list[int], tiny_model_dir: Callable[[str], Path]
) -> None:
    disabled = () if optimized else (FastPath.OPTIMIZED_MODULES,)
    model = str(tiny_model_dir("llama"))
    settings = kind(model=model, dtype="float32", num_threads=1, disabled_fast_paths=disabled)
    opened = runtime.open_runtime(settings)
    opened.device.close(5.0)
    assert any(isinstance(module, CpuRMSNorm) for module in opened.model._model.modules()) == optimized


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("attention", ["kernels", "torch"])
def test_the_setting_that_chooses_attention_chooses_what_draws_tokens(
    kind: type[ServiceSettings],
    attention: Literal["kernels", "torch"],
    begun: list[int],
    tiny_model_dir: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The setting chooses between kernels and operators, for attention and for drawing tokens. A log line says which of
    them draws. The test pretends to have a device with kernels for both.
    """
    kernels = TritonDraws()
    monkeypatch.setattr(runtime, "new_draw_kernels", lambda kind, **device: kernels if kind == "kernels" else None)
    settings = kind(model=str(tiny_model_dir("llama")), dtype="float32", num_threads=1, attention=attention)
    with capture_logs() as logs:
        opened = runtime.open_runtime(settings)
    opened.device.close(5.0)
    assert opened.draw_kernels is (kernels if attention == "kernels" else None)
    told = [line["draws"] for line in logs if line["event"] == "draw_chosen"]
    assert told == ["kernels" if attention == "kernels" else "operators"]


@pytest.mark.parametrize(("disabled", "expected"), [((), 256), ((FastPath.PREFIX_CACHE,), 0)], ids=["on", "off"])
async def test_a_prefill_service_says_how_much_it_may_cache(
    disabled: tuple[FastPath, ...], expected: int, begun: list[int], tiny_model_dir: Callable[[str], Path]
) -> None:
    """If a prefill service caches nothing, the decode service must not expect to find anything cached there."""
    settings = PrefillSettings(
        model=str(tiny_model_dir("llama")),
        listen=free_address(),
        dtype="float32",
        num_threads=1,
        max_kv_tokens=256,
        disabled_fast_paths=disabled,
    )
    async with (
        serving_here(prefill_main, settings, READY_SERVICE["prefill"]) as service,
        grpc.aio.insecure_channel(service.address) as channel,
    ):
        await service.turns(HealthStatus.SERVING)
        load = await prefill_pb2_grpc.PrefillStub(channel).GetLoad(prefill_pb2.GetPrefillLoadRequest())
    assert load.max_cached_tokens == expected


@pytest.mark.parametrize("keeps", [True, False])
def test_a_service_keeps_freed_memory(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def import_serve() -> Serve[DecodeSettings]:
        raise StartupError("far enough")

    monkeypatch.setattr(process, "keep_freed_memory", lambda: done.append("kept"))
    arguments = [] if keeps else ["--disabled-fast-paths=kept_memory"]
    assert run_service("decode_service", DecodeSettings, import_serve, arguments) == EXIT_STARTUP
    assert done == ["kept"] * keeps


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], ["waits"]), (["--disabled-fast-paths=forwards_first"], []), (["--device=cuda"], [])],
    ids=["on", "off", "on a GPU"],
)
def test_a_services_threads_wait_for_those_that_compute(
    arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def import_serve() -> Serve[DecodeSettings]:
        raise StartupError("far enough")

    monkeypatch.setattr(process, "wait_for_computing", lambda: done.append("waits"))
    assert run_service("decode_service", DecodeSettings, import_serve, arguments) == EXIT_STARTUP
    assert done == expected


@pytest.mark.parametrize("nontemporal", [True, False])
def test_large_kv_lands_past_the_caches(
    nontemporal: bool, begun: list[int], tiny_model_dir: Callable[[str], Path]
) -> None:
    disabled = () if nontemporal else (FastPath.NONTEMPORAL_COPIES,)
    model = str(tiny_model_dir("llama"))
    settings = DecodeSettings(model=model, dtype="float32", num_threads=1, disabled_fast_paths=disabled)
    process = Process(
        instance_id="a",
        runtime=runtime.open_runtime(settings),
        registry=CollectorRegistry(),
        switch=RoleSwitch([Role.DECODE]),
    )
    engine = new_engine(settings, process, SIZE, on_step=lambda stats: None)
    engine.close()
    process.runtime.device.close(5.0)
    assert engine._landing._copy is (copy_kv if nontemporal else Tensor.copy_)
