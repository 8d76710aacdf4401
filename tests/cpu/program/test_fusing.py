"""Tests that fused forwards are compiled in the background while a service runs, and then replace the operators."""

from __future__ import annotations

import pickle
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from baton_cpu.compiler import kernel_cache
from baton_cpu.engine import CompiledEngine
from baton_cpu.program import fusing, weights
from baton_cpu.program.shared_weights import PanelLinear
from common.model.target import TargetModel
from common.service.work_beside import Work, WorkBeside, new_fusing
from tests.model.paged_model import PagedModel
from tests.support.loading import load_target

BOUND_S = 60.0


class NoForward:
    """A ForwardProgram that is never run."""

    is_closed = False

    def close(self, timeout_s: float) -> bool:
        self.is_closed = True
        return True


class Kernels:
    """Fakes for compiling: the cache on disk, the way a process loads kernels from it, and `on_compile` in place of the
    compiler's process.
    """

    def __init__(self) -> None:
        self.num_compiled = 0
        self.outputs: list[str] = []  # of the next processes, which fail
        self.on_compile: Callable[[Callable[[], None]], None] = lambda on_wait: None
        self.forward = NoForward()
        self.apart = 0.0

    def run_python(self, arguments: list[str], *, on_wait: Callable[[], None]) -> str | None:
        self.num_compiled += 1
        self.on_compile(on_wait)
        if self.outputs:
            return self.outputs.pop()
        (Path(arguments[3]) / "kernel.nbc").write_bytes(pickle.dumps("kernel"))
        return None

    def load(self, directory: Path, dtype: torch.dtype) -> bool:
        return bool(pickle.loads((directory / "kernel.nbc").read_bytes()) == "kernel")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kernels:
    kernels = Kernels()
    monkeypatch.setattr(kernel_cache._Cache, "directory", tmp_path)
    monkeypatch.setattr(fusing, "run_python", kernels.run_python)
    monkeypatch.setattr(fusing, "load_kernels", kernels.load)
    monkeypatch.setattr(fusing, "new_forwards", lambda *_, **__: [kernels.forward])
    monkeypatch.setattr(fusing, "difference", lambda *_, **__: kernels.apart)
    return kernels


@pytest.fixture
def model_dir(tiny_model_dir: Callable[[str], Path]) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture
def model(model_dir: Path) -> TargetModel:
    return load_target(model_dir, device="cpu", dtype="float32", fuses=True)


def fuse_again(model_dir: Path) -> list[str]:
    """Fuses a fresh copy of the model, as another process would. Returns the names of the log lines."""
    return fuse_beside(load_target(model_dir, device="cpu", dtype="float32", fuses=True))


def started(model: TargetModel, *then: Work) -> WorkBeside:
    fusing, beside = new_fusing(CompiledEngine(), model, None, num_threads=1, max_tokens=64), WorkBeside()
    assert fusing is not None
    beside.start(fusing, *then)
    return beside


def fuse_to_the_end(model: TargetModel) -> None:
    has_ended = threading.Event()
    beside = started(model, lambda check: has_ended.set())
    assert has_ended.wait(BOUND_S) and beside.stop(BOUND_S)


def fuse_beside(model: TargetModel) -> list[str]:
    """Fuses the model in the background, and waits for the end of that. Returns the names of the log lines."""
    with capture_logs() as logs:
        fuse_to_the_end(model)
    return [str(line["event"]) for line in logs]


def test_they_are_compiled_once_and_used(model_dir: Path, model: TargetModel, kernels: Kernels) -> None:
    assert fuse_again(model_dir) == ["compiling_kernels", "fused_forward_ready"]
    assert fuse_beside(model) == ["fused_forward_ready"]
    assert model.runs_program and kernels.num_compiled == 1 and model.new_decoder is None


def test_where_none_are_kept_every_start_compiles_them_and_leaves_nothing(
    model_dir: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel_cache._Cache, "directory", None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert [fuse_again(model_dir) for _ in range(2)] == [["compiling_kernels", "fused_forward_ready"]] * 2
    assert kernels.num_compiled == 2 and not list(tmp_path.iterdir())


def test_what_computes_something_else_is_closed_and_never_used(model: TargetModel, kernels: Kernels) -> None:
    kernels.apart = 1.0
    assert fuse_beside(model) == ["compiling_kernels", "fused_forward_failed"]
    assert not model.runs_program and kernels.forward.is_closed and model.new_decoder is None
    assert not model.modules_of(PanelLinear)


@pytest.mark.parametrize("is_room_left", [True, False])
def test_where_packing_fails_layers_have_their_own_weights_again_if_there_is_room(
    is_room_left: bool, model: TargetModel, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_shared: list[int] = []
    take = weights.WeightMemory.zeros

    def zeros(memory: weights.WeightMemory, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        num_shared.append(len(model.modules_of(PanelLinear)))
        if num_shared[-1]:
            if not is_room_left:
                monkeypatch.setattr("common.host.memory.available_bytes", lambda: 1000)
            raise OSError("no room")
        return take(memory, num_elements, dtype)

    before = PagedModel(model, num_rows=1).extend({1: [1, 2, 3]})
    monkeypatch.setattr(weights.WeightMemory, "zeros", zeros)
    assert fuse_beside(model) == ["compiling_kernels", "fused_forward_failed"]
    assert num_shared[-1] > 0 and not model.runs_program
    assert len(model.modules_of(PanelLinear)) == (0 if is_room_left else num_shared[-1])
    torch.testing.assert_close(PagedModel(model, num_rows=1).extend({1: [1, 2, 3]}), before)


def test_where_kernels_cannot_be_kept_they_are_compiled_for_this_process(
    model: TargetModel, kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(kernel_cache._Cache, "directory", tmp_path / "file" / "kernels")
    assert fuse_beside(model) == ["kernels_not_kept", "compiling_kernels", "fused_forward_ready"]
    assert model.runs_program


def test_where_kernels_fill_the_disk_they_are_compiled_for_this_process(model: TargetModel, kernels: Kernels) -> None:
    kernels.outputs = ["Traceback\nOSError: [Errno 28] No space left on device"]
    assert fuse_beside(model) == ["compiling_kernels", "kernels_not_kept", "compiling_kernels", "fused_forward_ready"]
    assert model.runs_program


def test_where_there_is_no_room_for_all_weights_none_are_packed(
    model: TargetModel, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.host.memory.available_bytes", lambda: 1000)
    monkeypatch.setattr(weights, "untouched_zeros", lambda *_, **__: pytest.fail("took some of it"))
    with capture_logs() as logs:
        fuse_to_the_end(model)
    assert [line["event"] for line in logs] == ["compiling_kernels", "fused_forward_failed"]
    assert "are available" in logs[-1]["error"] and not logs[-1]["exc_info"]
    assert not model.runs_program and model.new_decoder is None


def test_a_defect_is_logged_with_where_it_is(
    model: TargetModel, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusing, "difference", lambda *_, **__: 1 // 0)
    with capture_logs() as logs:
        fuse_to_the_end(model)
    if not any(line["event"] == "fused_forward_failed" for line in logs):
        pytest.fail(f"not logged: {logs}")
    assert logs[-1]["exc_info"] is True


def test_damaged_kernels_are_compiled_again(model_dir: Path, kernels: Kernels, tmp_path: Path) -> None:
    fuse_again(model_dir)
    (kept,) = tmp_path.rglob("kernel.nbc")
    kept.write_bytes(kept.read_bytes()[:-3])
    assert fuse_again(model_dir) == ["kernels_damaged", "compiling_kernels", "fused_forward_ready"]
    assert fuse_again(model_dir) == ["fused_forward_ready"]


def test_a_compiler_that_takes_too_long_is_given_up(
    model: TargetModel, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusing, "COMPILE_TIMEOUT_S", 0.0)
    kernels.on_compile = lambda on_wait: on_wait()
    assert fuse_beside(model) == ["compiling_kernels", "fused_forward_failed"]


def test_it_ends_with_its_service(model: TargetModel, kernels: Kernels) -> None:
    """The service ends while the compiler's process runs. That process ends too, and none of its kernels is used."""
    is_compiling, has_ended = threading.Event(), threading.Event()

    def compile_for_ever(on_wait: Callable[[], None]) -> None:
        is_compiling.set()
        try:
            while not has_ended.wait(0.001):
                on_wait()
        finally:
            has_ended.set()

    kernels.on_compile = compile_for_ever
    with capture_logs() as logs:
        beside = started(model)
        assert is_compiling.wait(BOUND_S)
        assert beside.stop(BOUND_S)
    assert has_ended.is_set() and not model.runs_program
    assert [line["event"] for line in logs] == ["compiling_kernels"]
