"""Tests of the fast paths of forwards and start-up in either service. Each has a name that switches it off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs
from torch import Tensor

from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE
from baton.v1 import prefill_pb2, prefill_pb2_grpc
from baton_cpu.blocks.norm import CpuRMSNorm
from baton_cpu.compiler.kernel_cache import keep_kernels, kernels_dir
from baton_cpu.kv_copy import copy_kv
from common.attention.torch_attention import TorchAttention
from common.checkpoints.cache import kernels_cache_dir
from common.config.fast_paths import FastPath
from common.config.settings import DecodeSettings, PrefillSettings, ServiceSettings
from common.draft.paged_head import PagedHead
from common.errors import StartupError
from common.kv.pool_size import PoolSize
from common.model.target import TargetModel
from common.role import Role
from common.sampling.triton_draws import TritonDraws
from common.service import process, runtime
from common.service.cpu_engine import CpuEngine
from common.service.process import Process, Serve, run_service
from common.service.program import EXIT_STARTUP
from common.service.roles import RoleSwitch
from common.service.runtime import Runtime
from common.service.work_beside import Check, Work
from decode_service.main import engine_config, new_engine
from prefill_service import main as prefill_main
from tests.support.engines import Received
from tests.support.free_ports import free_address
from tests.support.services_here import serving_here

SIZE = PoolSize(max_rows=4, max_kv_tokens=256, max_window_tokens=0, max_context_tokens=128, decided_by="the test")
Opens = Callable[..., Runtime]

each_service = pytest.mark.parametrize("kind", [PrefillSettings, DecodeSettings])


@pytest.fixture
def opened(tiny_model_dir: Callable[[str], Path]) -> Iterator[Opens]:
    """A function that opens the runtime of a service with a tiny model and these settings. The test's end closes it."""
    with ExitStack() as at_end:

        def open_runtime(kind: type[ServiceSettings] = DecodeSettings, **options: Any) -> Runtime:
            settings = kind(model=str(tiny_model_dir("llama")), dtype="float32", num_threads=1, **options)
            opened = runtime.open_runtime(settings)
            at_end.callback(opened.device.close, 5.0)
            at_end.callback(opened.close)
            return opened

        yield open_runtime


def without(path: FastPath, *, is_left_out: bool) -> dict[str, Any]:
    return {"disabled_fast_paths": (path,) if is_left_out else ()}


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
    disabled: tuple[FastPath, ...], expected: list[str], opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    have_begun = threading.Semaphore(0)

    def work(name: str) -> Work:
        def run(_check: Check) -> None:
            done.append(name)
            have_begun.release()

        return run

    monkeypatch.setattr(runtime, "new_fusing", lambda *_, **__: work("fuse"))
    service = opened(disabled_fast_paths=disabled)
    assert done == []
    service.start_beside(work("populate"))
    for _ in expected:
        assert have_begun.acquire(timeout=20.0)
    service.close()
    assert done == expected


def test_a_pool_that_cannot_be_populated_is_told_and_forwards_are_fused(
    opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_fused = threading.Event()
    monkeypatch.setattr(runtime, "new_fusing", lambda *_, **__: lambda check: is_fused.set())
    service = opened()

    def populate(_check: Check) -> None:
        raise OSError("not here")

    with capture_logs() as logs:
        service.start_beside(populate)
        assert is_fused.wait(20.0)
        service.close()
    assert [(line["event"], line.get("error")) for line in logs] == [("kv_pool_not_populated", "not here")]


@each_service
@pytest.mark.parametrize(
    "options", [{"disabled_fast_paths": (FastPath.FUSED_FORWARDS,)}, {"attention": "torch"}], ids=str
)
def test_forwards_are_not_fused_where_a_setting_says_so(
    kind: type[ServiceSettings], options: dict[str, Any], begun: list[int], opened: Opens
) -> None:
    """A fused kernel includes attention, so it cannot be used when attention runs on PyTorch operators."""
    model = opened(kind, **options).model
    assert begun == [] and model.new_decoder is None
    assert isinstance(model.attention, TorchAttention) == ("attention" in options)


def test_what_a_service_may_put_into_a_forward_is_fused(begun: list[int], opened: Opens) -> None:
    opened(PrefillSettings, chunk_tokens=16, max_batch_tokens=700)
    opened(DecodeSettings)
    assert begun == [700, 512]


@pytest.fixture
def no_kernels_kept() -> Iterator[None]:
    before = kernels_dir()
    keep_kernels(None)
    yield
    keep_kernels(before)


@each_service
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.usefixtures("begun", "no_kernels_kept")
def test_kernels_are_kept_in_the_users_cache(kind: type[ServiceSettings], keeps: bool, opened: Opens) -> None:
    opened(kind, **without(FastPath.KERNEL_CACHE, is_left_out=not keeps))
    assert kernels_dir() == (kernels_cache_dir() if keeps else None)


@each_service
@pytest.mark.parametrize("optimized", [True, False])
@pytest.mark.usefixtures("begun")
def test_modules_are_optimized(kind: type[ServiceSettings], optimized: bool, opened: Opens) -> None:
    model = opened(kind, **without(FastPath.OPTIMIZED_MODULES, is_left_out=not optimized)).model
    assert bool(model.modules_of(CpuRMSNorm)) == optimized


@each_service
@pytest.mark.parametrize("attention", ["kernels", "torch"])
@pytest.mark.usefixtures("begun")
def test_the_setting_that_chooses_attention_chooses_what_draws_tokens(
    kind: type[ServiceSettings], attention: str, opened: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The setting chooses between kernels and operators, for attention and for drawing tokens. A log line says which of
    them draws. The test pretends to have a device with kernels for both.
    """
    kernels = TritonDraws()
    monkeypatch.setattr(runtime, "new_draw_kernels", lambda kind, **device: kernels if kind == "kernels" else None)
    with capture_logs() as logs:
        service = opened(kind, attention=attention)
    assert service.draw_kernels is (kernels if attention == "kernels" else None)
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


@pytest.mark.parametrize(
    ("step", "arguments", "is_taken"),
    [
        ("keep_freed_memory", [], True),
        ("keep_freed_memory", ["--disabled-fast-paths=kept_memory"], False),
        ("wait_for_computing", [], True),
        ("wait_for_computing", ["--disabled-fast-paths=forwards_first"], False),
        ("wait_for_computing", ["--device=cuda"], False),
    ],
)
def test_a_service_keeps_freed_memory_and_its_threads_wait_for_those_that_compute(
    step: str, arguments: list[str], is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def import_serve() -> Serve[DecodeSettings]:
        raise StartupError("far enough")

    monkeypatch.setattr(process, step, lambda: done.append(step))
    assert run_service("decode_service", DecodeSettings, import_serve, arguments) == EXIT_STARTUP
    assert done == [step] * is_taken


@pytest.mark.parametrize("nontemporal", [True, False])
@pytest.mark.usefixtures("begun")
def test_large_kv_lands_past_the_caches(nontemporal: bool, opened: Opens) -> None:
    options = without(FastPath.NONTEMPORAL_COPIES, is_left_out=not nontemporal)
    process = Process(
        instance_id="a", runtime=opened(**options), registry=CollectorRegistry(), switch=RoleSwitch([Role.DECODE])
    )
    settings = DecodeSettings(**options)
    config = engine_config(settings, None)
    engine = new_engine(settings, process, config, SIZE, outbox=Received(), on_step=lambda stats: None)
    engine.close()
    assert engine._landing._copy_kv is (copy_kv if nontemporal else Tensor.copy_)
