"""Tests that a configured device name gives a device, or an error that names the configuration key."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from common.device.cpu import CpuDevice
from common.device.factory import open_device
from common.errors import ConfigError
from tests.device.rigs import BOUND_S


def test_cpu_opens_a_cpu_device() -> None:
    device = open_device("cpu", num_threads=1)
    assert isinstance(device, CpuDevice)
    assert device.torch_device == torch.device("cpu")
    device.close(BOUND_S)


def test_less_than_one_thread_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_threads"):
        open_device("cpu", num_threads=0)


def test_importing_the_package_does_not_load_torch_or_cuda() -> None:
    code = "import sys, common.device; assert 'torch' not in sys.modules; import common.device.cuda"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=BOUND_S * 3)
