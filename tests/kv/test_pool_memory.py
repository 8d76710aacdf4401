"""Tests that a pool's memory on a CPU is taken from the system on first use or in the background, and that neither
changes the contents.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from common.errors import StartupError
from common.host import untouched_memory
from common.kv.kv_shard import OneDevice
from common.kv.layer_group import LayerGroupSpec
from common.kv.pool import KvPool
from common.service.work_beside import Stopped

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

GROUP = LayerGroupSpec(name="target", num_layers=4, num_planes=2, num_heads=2, head_dim=64, dtype="bfloat16")
NUM_SLOTS = 16384  # 32 MiB
POOL_BYTES = 4 * 2 * (NUM_SLOTS + 1) * 2 * 64 * 2


@pytest.fixture
def pool() -> KvPool:
    return KvPool(
        groups=[GROUP],
        max_rows=2,
        max_kv_tokens=NUM_SLOTS,
        max_tokens_per_row=16,
        tensors=OneDevice(torch.device("cpu")),
    )


PRESENT, EXCLUSIVE = np.uint64(1 << 63), np.uint64(1 << 56)


def resident_bytes(memory: Tensor, kind: np.uint64 = PRESENT) -> int:
    """Returns the bytes of the memory's pages that the system has provided. With EXCLUSIVE, pages shared with others,
    such as the page of zeros, do not count.
    """
    first, num_pages = memory.data_ptr() // mmap.PAGESIZE, -(-memory.nbytes // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(8 * first)
        entries = np.frombuffer(pages.read(8 * num_pages), np.uint64)
    assert len(entries) == num_pages
    return int(np.count_nonzero(entries & kind)) * mmap.PAGESIZE


def test_it_takes_what_is_used(pool: KvPool) -> None:
    buffer = pool.buffers["target"]
    assert resident_bytes(buffer) == 0
    used = buffer[0, 0, :4096].fill_(1.0)
    assert used.nbytes <= resident_bytes(buffer) <= used.nbytes + (4 << 20)  # the system may use large pages
    assert not buffer[1].any()


def test_populated_it_is_all_there_as_it_was(pool: KvPool) -> None:
    buffer = pool.buffers["target"]
    buffer[2, 1, 77] = 3.0
    pool.populate(lambda: None)
    assert resident_bytes(buffer) >= buffer.nbytes
    assert resident_bytes(buffer, EXCLUSIVE) >= buffer.nbytes, "pages to be read only: a write has to wait all the same"
    assert (buffer[2, 1, 77] == 3.0).all()
    buffer[2, 1, 77] = 0.0
    assert not buffer.any()


def test_populating_ends_between_two_parts(pool: KvPool) -> None:
    num_parts = 0

    def check() -> None:
        nonlocal num_parts
        num_parts += 1
        if num_parts == 3:
            raise Stopped

    with pytest.raises(Stopped):
        pool.populate(check)
    assert resident_bytes(pool.buffers["target"]) < pool.buffers["target"].nbytes // 2


def test_populating_tells_what_the_system_cannot(pool: KvPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untouched_memory, "MADV_POPULATE_WRITE", 9999)
    with pytest.raises(OSError, match="Invalid argument"):
        pool.populate(lambda: None)


def test_populating_ends_where_others_have_taken_what_is_still_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untouched_memory, "ASKED_BYTES", 4 << 20)
    memory = untouched_memory.untouched_zeros(16 << 20)
    rooms = iter([16 << 20, 12 << 20, (8 << 20) - 1])
    monkeypatch.setattr("common.host.memory.available_bytes", lambda: next(rooms))
    with pytest.raises(OSError, match="are available"):
        untouched_memory.populate(memory, lambda: None)
    assert resident_bytes(memory) == 8 << 20


@pytest.mark.parametrize("num_available", [2 * POOL_BYTES - 1, 2 * POOL_BYTES])
def test_it_asks_for_all_its_groups_before_it_is_made(num_available: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.host.memory.available_bytes", lambda: num_available)
    groups = [GROUP, replace(GROUP, name="draft")]
    raises = pytest.raises(StartupError, match=r"^max_kv_tokens: 16384 tokens take 0\.1 GiB on cpu, .*are available")
    with nullcontext() if num_available == 2 * POOL_BYTES else raises:
        KvPool(
            groups=groups,
            max_rows=2,
            max_kv_tokens=NUM_SLOTS,
            max_tokens_per_row=16,
            tensors=OneDevice(torch.device("cpu")),
        )


@pytest.mark.parametrize("num_slots", [10**12, 10**17])
def test_one_that_there_is_no_room_for_names_its_setting(num_slots: int) -> None:
    with pytest.raises(StartupError, match=rf"^max_kv_tokens: {num_slots} tokens take .* GiB on cpu, .*not to be had"):
        KvPool(
            groups=[GROUP],
            max_rows=2,
            max_kv_tokens=num_slots,
            max_tokens_per_row=16,
            tensors=OneDevice(torch.device("cpu")),
        )
