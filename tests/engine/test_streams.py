"""Invariant I11: the engine uses one Stream and one Event type, and names no device."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from common.device.cpu import CpuDevice
from common.device.stream import Event
from tests.engine.harness import ScriptedEngine

ROOT = Path(__file__).parents[2]
SERVICES = ("decode_service", "prefill_service")
ENGINE_ROOMS = ("schedule", "speculate", "forward")
CUDA_IN_THE_SCHEDULER = (
    "import torch.cuda",
    "torch.cuda.synchronize()",
    "from torch.cuda import Event",
    "from common.device.cuda import CudaEvent",
    "from common.device.cpu import CpuStream",
    "isinstance(event, CudaEvent)",
    "seq_lens.to('cuda:0')",
)
NEUTRAL_DEVICE_MODULES = {f"common.device.{name}" for name in ("stream", "cell", "errors", "upload", "across")}


def engine_sources() -> dict[str, str]:
    """Returns the source of the engines' packages and of common/kv, by path. `main` is not included, as it opens the
    device.
    """
    rooms = [ROOT / service / room for service in SERVICES for room in ENGINE_ROOMS]
    paths = [path for room in (*rooms, ROOT / "common" / "kv") for path in room.glob("*.py")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in sorted(paths)}


def device_names(source: str) -> set[str]:
    """Returns the names in `source` that belong to one device only."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module.startswith("common.device") and node.module not in NEUTRAL_DEVICE_MODULES:
                names.add(node.module)
            names |= {name for name in (node.module, *(alias.name for alias in node.names)) if is_device_name(name)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if is_device_name(alias.name)}
        elif isinstance(node, ast.Attribute) and is_device_name(node.attr):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and is_device_name(node.id):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda"):
            names.add(node.value)
    return names


def is_device_name(name: str) -> bool:
    return any(word in name.lower() for word in ("cuda", "non_blocking", "current_stream", "is_pinned"))


def check_no_device_is_named(planted: str = "") -> None:
    sources = engine_sources()
    assert "decode_service/schedule/scheduler.py" in sources and "prefill_service/schedule/scheduler.py" in sources
    named = {path: device_names(source) for path, source in {**sources, "planted": planted}.items()}
    named = {path: names for path, names in named.items() if names}
    assert not named, f"a device is named in {named}"


def check_a_device_has_one_event_type() -> None:
    """An event has the same methods whichever stream recorded it, and every stream of its device can wait for it."""
    scripted = ScriptedEngine()
    cpu = CpuDevice(num_threads=1, wait_timeout_s=5.0)
    try:
        for device in (scripted.device, cpu):
            streams = [device.schedule_stream, device.new_stream("a"), device.new_stream("b")]
            for recorder in streams:
                event: Event = recorder.record()
                for waiter in streams:
                    waiter.wait(event)
                event.synchronize(5.0)
                assert event.is_done() and event.error is None
    finally:
        cpu.close(5.0)


def test_no_device_is_named() -> None:
    check_no_device_is_named()


def test_a_device_has_one_event_type() -> None:
    check_a_device_has_one_event_type()


@pytest.mark.parametrize("planted", CUDA_IN_THE_SCHEDULER)
def test_a_device_name_in_the_scheduler_is_found(planted: str) -> None:
    with pytest.raises(AssertionError, match="a device is named in"):
        check_no_device_is_named(planted)
