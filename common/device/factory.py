"""Opens a device by its configured name."""

from __future__ import annotations

import torch

from common.device.cpu import CpuDevice
from common.device.cuda import CudaDevice
from common.device.stream import Device
from common.errors import ConfigError, StartupError
from common.telemetry.timeline import Timeline

_WAIT_TIMEOUT_S = 300.0
"""For how long a CPU's schedule stream waits for another stream at most."""


def open_device(name: str, *, num_threads: int, timeline: Timeline | None = None) -> Device:
    """Opens the device `name`: "cpu", "cuda" or "cuda:<index>". It becomes the calling thread's current device.

    Only the CPU uses `num_threads` (of each compute stream). Each stream of the device records its
    work on the track of `timeline` that has the stream's name. Raises ConfigError for a wrong name or number of
    threads, and StartupError if the device does not work.
    """
    try:
        torch_device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: {name!r} is not a device") from error
    if torch_device.type == "cpu":
        if num_threads < 1:
            raise ConfigError(f"num_threads: {num_threads} is less than 1")
        return CpuDevice(num_threads=num_threads, wait_timeout_s=_WAIT_TIMEOUT_S, timeline=timeline)
    if torch_device.type != "cuda":
        raise ConfigError(f"device: {name!r} is neither cpu nor cuda")
    index = torch_device.index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(f"device: {name!r} is not there; {torch.cuda.device_count()} CUDA devices are")
    try:
        return CudaDevice(index, timeline=timeline)
    except (RuntimeError, AssertionError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise StartupError(f"device: {name!r} does not work: {reason}") from error


def allow_tf32(is_allowed: bool) -> None:
    """Sets whether this process's GPUs may round float32 to 10 bits of fraction when they multiply matrices."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = is_allowed
