"""KV copies on a CPU: large segments bypass the caches and reach exactly the slots of their row."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from baton_cpu import kv_copy
from baton_cpu.kv_copy import copy_kv
from common.device.factory import open_device
from common.kv.kv_shard import OneDevice
from common.kv.layer_group import LayerGroupSpec
from common.kv.pool import CopyKv, KvPool
from common.wire.handoff import KvSegment
from decode_service.schedule.landing import LandingZone
from decode_service.schedule.request import Request

GROUP = LayerGroupSpec("target", num_layers=4, num_planes=2, num_heads=8, head_dim=64, dtype="bfloat16")
NUM_TOKENS = 1024
BOUND_S = 60.0


@pytest.mark.parametrize(
    ("num_layers", "copy", "is_past_caches"),
    [(4, copy_kv, True), (1, copy_kv, False), (4, Tensor.copy_, False)],
)
def test_a_segment_lands_in_its_rows_slots(
    num_layers: int, copy: CopyKv, is_past_caches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, num_calls = kv_copy.copy_blocks(), []
    monkeypatch.setattr(kv_copy, "copy_blocks", lambda: lambda *arguments: (num_calls.append(1), kernel(*arguments)))
    device = open_device("cpu", num_threads=1)
    pool = KvPool(
        groups=[GROUP],
        max_rows=2,
        max_kv_tokens=2 * NUM_TOKENS,
        max_tokens_per_row=NUM_TOKENS,
        tensors=OneDevice(device.torch_device),
    )
    assert pool.reserve(3) is not None
    lease = pool.reserve(NUM_TOKENS)
    assert lease is not None
    zone = LandingZone(device=device, pool=pool, vocab_size=9, copy_kv=copy)
    req = SimpleNamespace(
        request_id="a",
        lease=lease,
        token_ids=[1] * NUM_TOKENS,
        num_attempts=1,
        kv_bytes=0,
        num_unsent=lambda group_name: 0,
    )
    payload = np.random.default_rng(1).integers(0, 256, num_layers * GROUP.layer_token_bytes * NUM_TOKENS, np.uint8)
    zone.open("call", "replica", [cast(Request, req)])
    zone.take_frame(
        "call",
        KvSegment(
            row=0,
            layer_group="target",
            layer_start=0,
            num_layers=num_layers,
            token_start=0,
            num_tokens=NUM_TOKENS,
            payload=payload,
        ),
    )
    give_up_s = time.monotonic() + BOUND_S
    while not zone.poll().freed:
        assert time.monotonic() < give_up_s
        time.sleep(0.001)
    zone.close(BOUND_S)
    device.close(BOUND_S)
    expected = torch.zeros_like(pool.buffers["target"]).view(torch.uint8)
    shape = (num_layers, GROUP.num_planes, NUM_TOKENS, *expected.shape[3:])
    expected[:num_layers, :, torch.from_numpy(lease.slots)] = torch.from_numpy(payload).view(shape)
    assert torch.equal(pool.buffers["target"].view(torch.uint8), expected)
    assert bool(num_calls) == is_past_caches
