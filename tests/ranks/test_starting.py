"""Tests of how ranks are started and load the model, and of what the first rank waits for, without a model."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.config.settings import DecodeSettings
from common.device.cpu import CpuDevice
from common.device.factory import allow_tf32
from common.errors import StartupError
from common.host.child_process import start_peer
from common.model.loader import LoadArguments
from common.model.part import MemberLost
from common.ranks import leader, process_group
from common.ranks.leader import Ranks, have_answered, load_together
from common.service.runtime import open_runtime
from tests.support.open_files import open_files

CPU = torch.device("cpu")


class LostRanks(Ranks):
    """Ranks of which one has ended. They have no processes."""

    def __init__(self) -> None:
        self._loss = "rank 1 of 2 was killed"

    @property
    def behind(self) -> str:
        return "rank 1"


class LivingRanks(LostRanks):
    def __init__(self) -> None:
        self._loss = None


@pytest.fixture
def switches() -> Iterator[list[Any]]:
    """PyTorch's switches for TF32, which are off in the test and afterwards as they were."""
    switches: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
    before = [switch.allow_tf32 for switch in switches]
    allow_tf32(False)
    yield switches
    for switch, allowed in zip(switches, before, strict=True):
        switch.allow_tf32 = allowed


@pytest.mark.thorough
def test_a_service_loads_on_its_device_and_lets_all_ranks_compute_as_its_settings_say(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switches: list[Any]
) -> None:
    """A new thread computes on GPU 0, and without TF32, until it is told otherwise."""
    entered: list[str] = []
    monkeypatch.setattr(CpuDevice, "enter_thread", lambda device: entered.append(threading.current_thread().name))
    monkeypatch.setattr(leader, "start_peer", lambda module: start_peer("tests.support.noting_follower"))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    model = str(tiny_model_dir("llama"))
    opened = open_runtime(DecodeSettings(model=model, dtype="float32", num_threads=2, tensor_parallel=2, tf32=True))
    opened.close()
    opened.device.close(5.0)
    assert entered == ["load"]
    assert (tmp_path / "notes").read_text() == "[True, True]"
    assert all(switch.allow_tf32 for switch in switches)


@pytest.mark.parametrize("what", ["socket", "store"])
def test_ranks_that_cannot_be_connected_end_the_start_and_leave_nothing_open(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise (OSError if what == "socket" else RuntimeError)("no port is free")

    if what == "socket":
        monkeypatch.setattr(socket, "create_server", fail)
    else:
        monkeypatch.setattr(process_group, "TCPStore", fail)
    arguments: LoadArguments = {}  # type: ignore[typeddict-item]
    before = open_files()
    with pytest.raises(StartupError, match=r"^tensor_parallel: ranks cannot be connected: no port is free$"):
        Ranks(None, [CPU, CPU], tmp_path, arguments, num_threads=1, kernels_dir=None, tf32=False)
    assert open_files() <= before


def test_a_load_that_never_ends_is_left_when_a_rank_is_lost() -> None:
    with pytest.raises(MemberLost):
        load_together(threading.Event().wait, LostRanks(), tell_interval_s=0.01)


def test_a_load_that_waits_for_ranks_tells_for_which() -> None:
    told = threading.Event()
    seen: list[str] = []

    def tell(behind: str) -> None:
        seen.append(behind)
        told.set()

    assert load_together(told.wait, LivingRanks(), tell=tell, tell_interval_s=0.01)
    assert set(seen) == {"rank 1"}


class LateFuture(Future[str]):
    """A future that is done as soon as a wait for its result has timed out."""

    def result(self, timeout: float | None = None) -> str:
        result = super().result()
        if timeout is not None:
            raise TimeoutError
        return result


def test_a_load_that_ends_as_the_wait_for_it_does_has_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader, "Future", LateFuture)
    assert load_together(lambda: "loaded", LivingRanks(), tell_interval_s=0.01) == "loaded"


def test_an_answer_that_comes_late_is_not_taken_for_the_next_one() -> None:
    (one, of_one), (two, of_two) = Pipe(), Pipe()
    assert not have_answered([one, two], 1, 0.01)

    of_one.send(1)
    of_two.send(2)
    assert not have_answered([one, two], 2, 0.01)

    of_one.send(2)
    of_two.send(2)
    assert have_answered([one, two], 2, 20.0)


def test_all_ranks_have_the_same_time_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, left_s = 0.0, []

    def wait(_waiting: Sequence[Connection], timeout_s: float) -> list[Connection]:
        nonlocal now_s
        left_s.append(timeout_s)
        now_s += 3.0
        return [one] if len(left_s) == 1 else []

    (one, of_one), (two, _of_two) = Pipe(), Pipe()
    of_one.send(1)
    monkeypatch.setattr(leader, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(leader, "wait", wait)
    assert not have_answered([one, two], 1, 5.0)
    assert left_s == [5.0, 2.0]


def test_no_answer_is_awaited_when_a_rank_has_ended() -> None:
    (one, _of_one), (two, of_two) = Pipe(), Pipe()
    of_two.close()
    assert not have_answered([one, two], 1, 600.0)
