"""The first rank's side: starts the processes of the other ranks, tells them what to compute, and watches them.

    rank 0   begin ──▶ forward ── sum, sum, ... join ──▶ logits
    rank 1   asleep ─▶ forward ── sum, sum, ... join ──▶ asleep

The others compute every forward that this rank computes, each on its part of the model, and nothing else: drawing,
drafts and the schedule are the first rank's. They read and write the KV of their heads: in one pool that all share
(one_pool.py), or in memory of their own (own_kv.py).
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler, send_handle
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.device.stream import GraphRecorder
from common.errors import StartupError
from common.host.child_process import Child, start_peer
from common.host.shared_tensors import SharedTensors
from common.kv.kv_shard import KvShard
from common.model.loader import LoadArguments
from common.model.part import Collective, MemberLost, Part
from common.ranks.messages import Load, NewFile, NoMorePool, RankEngine, ToFollower
from common.ranks.one_pool import OnePool
from common.ranks.own_kv import OwnKv
from common.ranks.pool_of_ranks import PoolOfRanks
from common.ranks.process_group import GroupCollective, new_store

_ERROR_BYTES = 4096
_CLOSE_TIMEOUT_S = 5.0
_END_TIMEOUT_S = 1.0

T = TypeVar("T")


class Ranks:
    """The processes of all ranks but the first, and this one's part of the model. Implements `Followers`.

    They load the model in `directory`, with `arguments`, while this process does. So create this object, and then load
    the model with `part`. Each rank computes with `num_threads` threads, and keeps compiled kernels in `kernels_dir`.
    `tf32` is what `allow_tf32` takes. With `engine` all ranks share one pool; without it, each has KV of its own. Rank
    r computes on `devices[r]`. Raises StartupError if a process cannot be started, or ranks cannot be connected.
    """

    def __init__(
        self,
        engine: RankEngine | None,
        devices: Sequence[torch.device],
        directory: Path,
        arguments: LoadArguments,
        *,
        num_threads: int,
        kernels_dir: Path | None,
        tf32: bool,
    ) -> None:
        num_ranks = len(devices)
        self._devices = devices
        self._tensors = SharedTensors()
        self._lock = threading.Lock()
        self._loss: str | None = None
        self._is_lost = threading.Event()
        self._is_closed = False
        self._num_sent_files = 1  # the collective's, which is sent first
        self._num_pools = 0  # pools that the ranks were told to let go of
        size = counts_bytes(num_ranks) if engine is None else engine.collective_bytes(num_ranks)
        # After the collective's memory each rank has a place for the message of the error that ended it.
        try:
            memory = self._tensors.zeros((size + num_ranks * _ERROR_BYTES,), torch.uint8)
        except OSError as error:
            raise _no_memory(error) from error
        self._errors = memory[size:].view(num_ranks, _ERROR_BYTES)
        self._collective: Collective
        self._pool: PoolOfRanks
        if engine is not None:
            self._collective = engine.new_collective(memory[:size], rank=0, num_ranks=num_ranks)
            self._pool, store_port = OnePool(self._tensors), None
        else:
            try:
                store = new_store(None, num_ranks=num_ranks)
            except StartupError:
                self._tensors.close()
                raise
            self._collective = group = GroupCollective(
                store, rank=0, num_ranks=num_ranks, torch_device=devices[0], counts=memory[:size].view(torch.int64)
            )
            self._pool, store_port = OwnKv(self._tensors, group, devices), store.port
        self.part = Part(0, num_ranks, self._collective, has_own_kv=engine is None)
        self._connections: list[Connection] = []
        self._processes: list[Child] = []
        self._watchers: list[threading.Thread] = []
        try:
            for rank in range(1, num_ranks):
                load = Load(
                    engine=engine,
                    directory=directory,
                    arguments=cast("LoadArguments", {**arguments, "device": str(devices[rank])}),
                    rank=rank,
                    num_ranks=num_ranks,
                    num_threads=num_threads,
                    kernels_dir=kernels_dir,
                    tf32=tf32,
                    collective_bytes=size,
                    store_port=store_port,
                )
                self._start(load)
        except OSError as error:
            self.close()
            raise StartupError(f"tensor_parallel: a rank cannot be started: {error}") from error

    def _start(self, load: Load) -> None:
        process, end = start_peer("common.ranks.follower")
        connection = Connection(end.detach())
        self._processes.append(process)
        self._connections.append(connection)
        watcher = threading.Thread(target=self._watch, args=(load.rank, process), name=f"rank-{load.rank}", daemon=True)
        self._watchers.append(watcher)
        watcher.start()
        connection.send(load)
        self._send_file(connection, process, 0)

    @property
    def loss(self) -> str | None:
        """Says which rank ended and how, or None while all live."""
        return self._loss

    @property
    def pids(self) -> Sequence[int]:
        """The ids of the processes of rank 1 and the later ones."""
        return [process.pid for process in self._processes]

    @property
    def behind(self) -> str:
        """Names the ranks that others wait for now, or "" if there are none."""
        counts = self._collective.counts()
        return ", ".join(
            f"rank {rank} (process {process.pid})"
            for rank, process in enumerate(self._processes, 1)
            if counts[rank] < max(counts)
        )

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        try:
            return self._pool.zeros(shape, dtype)
        except OSError as error:
            raise _no_memory(error) from error

    def kv(self, shape: Sequence[int], dtype: torch.dtype, heads: Sequence[range]) -> Sequence[KvShard]:
        return self._pool.kv(shape, dtype, heads)

    def share(self, memory: Tensor, file: int) -> None:
        self._pool.share(memory, file)

    def begin(self, batch: ForwardInput) -> None:
        """Tells the other ranks to compute this forward. Raises MemberLost if one has ended."""
        self._pool.begin(batch, self)

    def recorder(self, recorder: GraphRecorder) -> GraphRecorder:
        """Returns a recorder of this rank's work, which makes the other ranks record and replay their part of it."""
        return self._pool.recorder(recorder, self)

    def send(self, message: ToFollower) -> None:
        """Sends a message, after any memory made since the last message. Raises MemberLost if a rank has ended."""
        content = bytes(ForkingPickler.dumps(message))
        try:
            for file in range(self._num_sent_files, len(self._tensors.files)):
                for connection, process in zip(self._connections, self._processes, strict=True):
                    self._send_file(connection, process, file)
                self._num_sent_files = file + 1
            for connection, messages in zip(self._connections, self._pool.take_unsent(), strict=False):
                for each in messages:
                    connection.send(each)
            for connection in self._connections:
                connection.send_bytes(content)
        except OSError as error:
            raise MemberLost(f"a rank has ended: {error}") from error

    def _send_file(self, connection: Connection, process: Child, file: int) -> None:
        connection.send(NewFile())
        send_handle(connection, self._tensors.files[file], process.pid)

    def let_go_of_pool(self) -> None:
        """Makes all ranks let go of the pool's memory, and waits until they have, for a few seconds. Call it once the
        engine that used the pool has ended. It does not wait if a rank is lost.
        """
        self._num_pools += 1
        if self._loss is None:
            with contextlib.suppress(OSError):  # a rank has ended: `loss` says which
                for connection in self._connections:
                    connection.send(NoMorePool(self._num_pools))
                have_answered(self._connections, self._num_pools, _CLOSE_TIMEOUT_S)
        self._tensors.let_go(1)
        self._num_sent_files = 1
        self._pool.let_go()

    def least_free_bytes(self, free_bytes: int) -> int:
        """Returns the least free memory of any rank's GPU. The first rank's has `free_bytes`."""
        gpus = [device for device in self._devices[1:] if device.type == "cuda"]
        return min([free_bytes, *(torch.cuda.mem_get_info(device)[0] for device in gpus)])

    def give_up(self, error: BaseException) -> str:
        if isinstance(error, MemberLost):  # the end of the rank's process says how, and may take a moment to be seen
            self._is_lost.wait(_END_TIMEOUT_S)
        self._note_loss(f"rank 0 failed in a forward: {type(error).__name__}: {error}")
        return self._loss or "the ranks are closed"

    def close(self) -> None:
        """Kills the processes and waits for their end. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        for connection in self._connections:
            connection.close()
        self._collective.give_up()
        for process in self._processes:
            process.kill()
            process.wait()
        for watcher in self._watchers:
            watcher.join(_CLOSE_TIMEOUT_S)
        self._tensors.close()

    def _watch(self, rank: int, process: Child) -> None:
        code = process.wait()
        said = bytes(self._errors[rank].tolist()).rstrip(b"\0").decode(errors="replace")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        self._note_loss(f"rank {rank} of {self.part.num_ranks} (process {process.pid}) {how}{said and f': {said}'}")

    def _note_loss(self, loss: str) -> None:
        with self._lock:
            if self._is_closed or self._loss is not None:
                return
            self._loss = loss
            self._is_lost.set()
        self._collective.give_up()


def devices_of(torch_device: torch.device, num_ranks: int) -> list[torch.device]:
    """Returns the device of each rank: the host's CPU, or GPUs in the order of their numbers, the first `torch_device`.

    Raises StartupError if there are too few GPUs.
    """
    if torch_device.type == "cpu":
        return [torch_device] * num_ranks
    first, num_there = torch_device.index or 0, torch.cuda.device_count()
    if first + num_ranks > num_there:
        raise StartupError(
            f"tensor_parallel: {num_ranks} GPUs from number {first} on are needed; {num_there} are there"
        )
    return [torch.device("cuda", first + rank) for rank in range(num_ranks)]


def open_ranks(
    engine: RankEngine | None,
    torch_device: torch.device,
    directory: Path,
    arguments: LoadArguments,
    *,
    num_ranks: int,
    num_threads: int,
    kernels_dir: Path | None,
    tf32: bool,
) -> Ranks:
    """Starts the ranks. `engine` is the engine for CPUs; None on GPUs, or if not installed.

    Raises StartupError on a CPU without `engine`, or if there are too few GPUs.
    """
    if engine is None and torch_device.type == "cpu":
        raise StartupError("tensor_parallel: ranks need baton_cpu and numba, which are not installed")
    devices = devices_of(torch_device, num_ranks)
    return Ranks(engine, devices, directory, arguments, num_threads=num_threads, kernels_dir=kernels_dir, tf32=tf32)


@contextlib.contextmanager
def lost_ranks_named(ranks: Ranks | None) -> Iterator[None]:
    """Ends the ranks if the code inside fails. Raises StartupError, naming the rank, if it failed because one ended."""
    try:
        yield
    except Exception as error:
        if ranks is None:
            raise
        # Without a rank that has ended, GPUs go on with wrong sums, which then seem to be the model's fault.
        is_lost = isinstance(error, MemberLost) or (ranks.part.has_own_kv and ranks.loss is not None)
        loss = ranks.give_up(error) if is_lost else ""
        ranks.close()
        if not is_lost:
            raise
        raise StartupError(f"tensor_parallel: {loss}") from error
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def load_together(
    load: Callable[[], T],
    ranks: Ranks,
    *,
    enter_thread: Callable[[], object] = lambda: None,
    tell: Callable[[str], object] = lambda behind: None,
    tell_interval_s: float = 5.0,
) -> T:
    """Returns what `load` returns. It runs on a thread of its own, after `enter_thread`, so that this one can be
    interrupted by signals while ranks wait for each other. After each `tell_interval_s`, `tell` gets `ranks.behind`.

    Raises MemberLost if a rank has ended and `load` does not end.
    """
    loading: Future[T] = Future()

    def run() -> None:
        try:
            torch.set_num_threads(1)
            enter_thread()
            loading.set_result(load())
        except BaseException as error:
            loading.set_exception(error)

    threading.Thread(target=run, name="load", daemon=True).start()
    while not futures.wait([loading], tell_interval_s).done:
        if ranks.loss is not None:
            raise MemberLost("another rank is lost")
        tell(ranks.behind)
    return loading.result()


def have_answered(connections: Sequence[Connection], number: int, timeout_s: float) -> bool:
    """Waits for the answer `number` from all connections, and drops late answers to earlier requests.

    Returns whether all came within `timeout_s` in total. Returns False once a connection is closed.
    """
    waiting, deadline_s = list(connections), time.monotonic() + timeout_s
    while waiting:
        ready = wait(waiting, max(0.0, deadline_s - time.monotonic()))
        if not ready:
            return False
        for connection in [each for each in waiting if each in ready]:
            try:
                if connection.recv() == number:
                    waiting.remove(connection)
            except (OSError, EOFError):
                return False
    return True


def write_error(errors: Tensor, text: str) -> None:
    """Writes `text`, cut to N - 1 bytes, into `errors` [N] uint8, a rank's place for it."""
    encoded = text.encode()[: errors.numel() - 1]
    errors[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def counts_bytes(num_ranks: int) -> int:
    """Returns the size of the memory of a GroupCollective's counts."""
    return num_ranks * torch.int64.itemsize


def _no_memory(error: OSError) -> StartupError:
    return StartupError(f"tensor_parallel: memory that ranks share is not to be had: {error}")


def error_place(memory: Tensor, load: Load) -> Tensor:
    """Returns the place for a rank's error in the first file of shared tensors."""
    return memory[load.collective_bytes :].view(load.num_ranks, -1)[load.rank]
