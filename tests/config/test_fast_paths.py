"""What makes forwards and starts fast on either service, and that one setting each switches it off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs
from torch import Tensor

from common import runtime
from common.config.settings import DecodeSettings, PrefillSettings, ServiceSettings
from common.draft.paged_head import PagedHead
from common.model import kernel_cache
from common.model.cpu_copy import copy_kv
from common.model.cpu_norm import CpuRMSNorm
from common.model.kernel_cache import kernels_dir
from common.model.target import TargetModel
from common.model_cache import kernels_cache_dir
from common.service_main import Process
from common.work_beside import Check
from decode_service.main import _engine

BOTH = [PrefillSettings, DecodeSettings]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each model whose forwards are to be fused, the most tokens of one."""
    seen: list[int] = []

    def new_fusing(model: TargetModel, draft: PagedHead | None, *, num_threads: int, max_tokens: int) -> None:
        assert model.new_decoder is not None
        seen.append(max_tokens)

    monkeypatch.setattr(runtime, "new_fusing", new_fusing)
    return seen


@pytest.mark.parametrize("fuses", [True, False])
def test_the_pool_is_populated_beside_serving_before_forwards_are_fused(
    fuses: bool, monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Callable[[str], Path]
) -> None:
    done: list[str] = []
    is_populated, is_fused = threading.Event(), threading.Event()

    def populate(_check: Check) -> None:
        done.append("populate")
        is_populated.set()

    def fuse(_check: Check) -> None:
        done.append("fuse")
        is_fused.set()

    monkeypatch.setattr(runtime, "new_fusing", lambda *_, **__: fuse)
    settings = DecodeSettings(model=str(tiny_model_dir("llama")), dtype="float32", num_threads=1, fused_forward=fuses)
    opened = runtime.open_runtime(settings)
    assert done == []
    opened.start_beside(populate)
    assert is_populated.wait(20.0) and (not fuses or is_fused.wait(20.0))
    opened.close()
    opened.device.close(5.0)
    assert done == ["populate", *(["fuse"] if fuses else [])]


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
def test_one_setting_switches_it_off(
    kind: type[ServiceSettings], begun: list[int], tiny_model_dir: Callable[[str], Path]
) -> None:
    model = str(tiny_model_dir("llama"))
    opened = runtime.open_runtime(kind(model=model, dtype="float32", num_threads=1, fused_forward=False))
    opened.device.close(5.0)
    assert begun == [] and opened.model.new_decoder is None


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
    settings = kind(model=str(tiny_model_dir("llama")), dtype="float32", num_threads=1, keep_kernels=keeps)
    runtime.open_runtime(settings).device.close(5.0)
    assert kernels_dir() == (kernels_cache_dir() if keeps else None)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("optimized", [True, False])
def test_modules_are_optimized(
    kind: type[ServiceSettings], optimized: bool, begun: list[int], tiny_model_dir: Callable[[str], Path]
) -> None:
    settings = kind(model=str(tiny_model_dir("llama")), dtype="float32", num_threads=1, optimized_modules=optimized)
    opened = runtime.open_runtime(settings)
    opened.device.close(5.0)
    assert any(isinstance(module, CpuRMSNorm) for module in opened.model._model.modules()) == optimized


@pytest.mark.parametrize("nontemporal", [True, False])
def test_large_kv_lands_past_the_caches(
    nontemporal: bool, begun: list[int], tiny_model_dir: Callable[[str], Path]
) -> None:
    settings = DecodeSettings(
        model=str(tiny_model_dir("llama")), dtype="float32", num_threads=1, nontemporal_copies=nontemporal
    )
    process = Process(instance_id="a", runtime=runtime.open_runtime(settings), registry=CollectorRegistry())
    engine = _engine(settings, process, on_step=lambda stats: None)
    engine.close()
    process.runtime.device.close(5.0)
    assert engine._landing._copy is (copy_kv if nontemporal else Tensor.copy_)
