"""Tests of a rank's process on a GPU, in this process and on a fake of CUDA."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Pipe
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.ranks.follower import OwnKvRank, ReceivedFiles
from common.ranks.messages import NewKv, NoMorePool
from common.ranks.own_kv import ReceivedForwards
from tests.device.fake_cuda import FakeCuda
from tests.device.rigs import BOUND_S
from tests.support.ranked import NoCollective

GPU = torch.device("cuda", 1)


def test_the_memory_of_a_pool_is_free_before_a_rank_says_that_it_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps memory that is freed for itself, and the next pool is as large as what is free."""
    cuda = FakeCuda().patched(monkeypatch)
    first, connection = Pipe()
    group: Any = NoCollective()
    device: Any = SimpleNamespace(torch_device=GPU)
    forwards = ReceivedForwards(group, GPU)
    rank = OwnKvRank(SimpleNamespace(), connection, ReceivedFiles(connection), forwards, device)  # type: ignore[arg-type]

    def empty_cache() -> None:
        cuda.ask("empty the cache")
        assert not first.poll()

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    first.send(NewKv(torch.zeros(4)))
    first.send(NoMorePool(7))
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(rank.run)
        assert first.recv() == 7
        first.close()
        with pytest.raises(EOFError):
            running.result(BOUND_S)
    assert cuda.asked == [("empty the cache", GPU.index)]
