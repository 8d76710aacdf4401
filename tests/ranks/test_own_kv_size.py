"""Tests of how large a pool of several GPUs is, and of what is said if one of them has no room for its shard."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.config.settings import DecodeSettings
from common.device.stream import DeviceMemory
from common.errors import StartupError
from common.host.shared_tensors import SharedTensors
from common.kv.kv_shard import KvShard, PoolTensors
from common.kv.layer_group import LayerGroupSpec, WindowLayers
from common.kv.pool import KvPool
from common.kv.pool_size import MemoryBeside
from common.model.part import Part
from common.model.target import TargetModel, TargetShape
from common.ranks.leader import Ranks
from common.ranks.own_kv import OwnKv
from common.service.runtime import Runtime, StepMemory, memory_beside
from tests.support.ranked import NoCollective

GIB = 1 << 30
GPUS = [torch.device("cuda", 0), torch.device("cuda", 1)]
CONTEXT = 4096
FULL = LayerGroupSpec(name="target", num_layers=8, num_planes=2, num_heads=3, head_dim=64, dtype="float16")
WINDOW = LayerGroupSpec(name="window", num_layers=8, num_planes=2, num_heads=3, head_dim=64, dtype="float16", window=64)
DRAFT = LayerGroupSpec(name="draft", num_layers=1, num_planes=2, num_heads=2, head_dim=64, dtype="float16")
HEADS = [range(2), range(2, 3)]


class RanksOnGpus(Ranks):
    """Ranks that have no processes."""

    def __init__(self, part: Part) -> None:
        self._devices = GPUS
        self.part = part


def runtime_of(*, has_own_kv: bool) -> Runtime:
    """Returns the runtime of a model with 3 KV heads on two GPUs, the first of which has 2 of them in its own pool."""
    part = Part(0, 2, NoCollective(), has_own_kv=has_own_kv)
    shape = TargetShape(
        layer_group=FULL,
        windows=(WindowLayers(WINDOW, tuple(range(8, 16))),),
        kv_heads=[HEADS, HEADS],
        hidden_size=64,
        vocab_size=100,
        max_context_tokens=CONTEXT,
        eos_token_ids=(),
        dtype=torch.float16,
        torch_device=GPUS[0],
    )
    backend: Any = None
    model = TargetModel(model=nn.Module(), backend=backend, shape=shape, part=part)
    memory = DeviceMemory(total_bytes=80 * GIB, free_bytes=40 * GIB, held_bytes=GIB)
    unused: Any = dict.fromkeys(Runtime.__dataclass_fields__)
    return Runtime(
        **{
            **unused,
            "model": model,
            "device": SimpleNamespace(memory=lambda: memory, torch_device=GPUS[0]),
            "fingerprint": SimpleNamespace(layer_groups=(FULL, WINDOW, DRAFT)),
            "ranks": RanksOnGpus(part),
        }
    )


@pytest.mark.parametrize("free_gib", [{0: 40, 1: 10}, {0: 40, 1: 60}], ids=["short", "ample"])
@pytest.mark.parametrize("has_own_kv", [True, False])
def test_a_pool_is_as_large_as_the_fullest_gpu_has_room_for_shards(
    has_own_kv: bool, free_gib: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gib[device.index] * GIB, 80 * GIB))
    settings = DecodeSettings(model="m", max_rows=4096, memory_share=1.0)
    beside = MemoryBeside(row_bytes=0, peak_bytes=lambda num_rows: 0)
    size = runtime_of(has_own_kv=has_own_kv).size_pool(settings, beside, num_in_flight=1)
    num_heads = 2 if has_own_kv else 3
    token_bytes = (8 * num_heads + DRAFT.num_heads) * 2 * 64 * 2  # the draft head's KV is whole
    window_bytes = size.max_window_tokens * 8 * num_heads * 2 * 64 * 2
    taken = size.max_kv_tokens * (token_bytes + 8) + window_bytes
    room = min(free_gib.values()) * GIB
    assert room - GIB < taken <= room, "libraries have half a GiB"


@pytest.mark.parametrize("has_own_kv", [True, False])
def test_room_is_left_for_the_tables_that_a_recorded_step_sends(has_own_kv: bool) -> None:
    """The expected bytes are those that tensors take: entries as int64 from the table, as int32, and side by side."""

    def step(num_rows: int) -> StepMemory:
        return StepMemory(num_tokens=num_rows, num_logits=num_rows)

    def peak_bytes(runtime: Runtime) -> int:
        return memory_beside(runtime, step, staged_bytes=0, tokens_ahead=4).peak_bytes(8)

    table = torch.zeros(8, CONTEXT + 4, dtype=torch.int64)
    num_bytes = sum(each.nbytes for each in (table, table.int(), table.int())) * 2  # that of windows is as large
    whole = runtime_of(has_own_kv=False)
    assert peak_bytes(runtime_of(has_own_kv=has_own_kv)) - peak_bytes(whole) == (num_bytes if has_own_kv else 0)


class TensorsOnGpus(PoolTensors):
    torch_device = GPUS[0]

    def __init__(self, kv: OwnKv) -> None:
        self._kv = kv

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def kv(self, group_name: str, shape: Sequence[int], dtype: torch.dtype) -> Sequence[KvShard]:
        return self._kv.kv(shape, dtype, HEADS)


def test_a_shard_without_room_is_named_with_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        if device == GPUS[1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return new_zeros(shape, dtype=dtype, device="meta" if device == GPUS[0] else "cpu")

    new_zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    group: Any = NoCollective()
    num_tokens = (1 << 20) - 1  # with the padding slot the second shard has 1 head of 8 · 2 · 2^20 · 64 float16
    said = rf"^max_kv_tokens: {num_tokens} tokens need a shard of 2\.0 GiB on cuda:1, which is not to be had: CUDA out"
    with pytest.raises(StartupError, match=said):
        KvPool(
            groups=[FULL],
            max_rows=1,
            max_kv_tokens=num_tokens,
            max_tokens_per_row=16,
            tensors=TensorsOnGpus(OwnKv(SharedTensors(), group, GPUS)),
        )
