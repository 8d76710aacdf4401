"""Makes every GPU test compute float32 exactly: TF32 is off, whatever PyTorch defaults to on the machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    """Switches TF32 off by assignment, since pytest's monkeypatch cannot undo attributes that PyTorch computes
    (`backends.cuda.matmul`).
    """
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = False
    yield
    for switch, allowed in zip(switches, before, strict=True):
        switch.allow_tf32 = allowed
