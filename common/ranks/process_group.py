"""A Collective over a process group of torch.distributed: NCCL between GPUs, and gloo on CPUs, which only tests use."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from common.errors import StartupError
from common.model.part import MemberLost

_LONGEST = timedelta(days=1)
"""How long an operation may take. The watchdog of the service sees a rank that hangs much earlier."""
_HOST = "127.0.0.1"
_POLL_S = 0.01


def new_store(port: int | None, *, num_ranks: int) -> TCPStore:
    """Returns the store through which ranks find each other. The first rank opens it, without a `port`, and the others
    connect to its port. Raises StartupError.
    """
    open_store = partial(TCPStore, _HOST, timeout=_LONGEST, wait_for_workers=False)
    try:
        if port is not None:
            return open_store(port, num_ranks, is_master=False)
        with socket.create_server((_HOST, 0)) as server:  # by itself the store would listen on all interfaces
            port, file = server.getsockname()[1], server.detach()
        try:
            return open_store(port, num_ranks, is_master=True, master_listen_fd=file)
        except RuntimeError:
            with contextlib.suppress(OSError):
                os.close(file)
            raise
    except (OSError, RuntimeError) as error:
        raise StartupError(f"tensor_parallel: ranks cannot be connected: {error}") from error


class GroupCollective:
    """A Collective whose ranks have memory of their own. Work on GPUs is enqueued on the current stream, and the host
    does not wait.

    `counts` [num_ranks] int64 is memory that all ranks map. It is zeros at first, and has how many operations each rank
    has begun. The first operation waits until all ranks have come to it.

    A broadcast begins a forward that is served, and what such a forward computes may become visible. So after the first
    broadcast `give_up` leaves operations in flight on a GPU waiting: aborted ones would end with wrong sums.
    """

    def __init__(
        self,
        store: TCPStore,
        *,
        rank: int,
        num_ranks: int,
        torch_device: torch.device,
        counts: Tensor,
    ) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._torch_device = torch_device
        self._counts = counts.numpy()
        self._opened: Any = None
        self._serves = False
        self._is_given_up = threading.Event()

    def sum_up(self, values: Tensor) -> None:
        group = self._group()
        self._wait(lambda: group.allreduce([values]))

    def joined(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        group, widest = self._group(), max(widths)
        padded = torch.nn.functional.pad(part, (0, widest - part.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in widths]
        self._wait(lambda: group.allgather([parts], [padded]))
        return torch.cat([each[..., :width] for each, width in zip(parts, widths, strict=True)], dim=-1)

    def broadcast(self, values: Tensor) -> None:
        """Replaces `values`, which are contiguous, by the first rank's. Raises MemberLost."""
        self._serves = True
        group = self._group()
        self._wait(lambda: group.broadcast([values]))

    def note_replay(self) -> None:
        """Counts all operations of a replayed graph as one."""
        self._counts[self._rank] += 1

    def give_up(self) -> None:
        self._is_given_up.set()
        if self._opened is not None and self._torch_device.type == "cuda" and not self._serves:
            threading.Thread(target=self._opened.abort, name="abort", daemon=True).start()

    def counts(self) -> list[int]:
        counts: list[int] = self._counts.tolist()
        return counts

    def _group(self) -> Any:
        self._counts[self._rank] += 1
        while self._opened is None and not self._counts.all() and not self._is_given_up.is_set():
            time.sleep(_POLL_S)  # to open a group would wait without end for a rank that has ended
        if self._is_given_up.is_set():
            raise MemberLost("another rank is lost")
        if self._opened is None:
            try:
                self._opened = _new_group(self._store, self._rank, self._num_ranks, self._torch_device)
            except RuntimeError as error:
                raise MemberLost(f"ranks cannot be connected: {error}") from error
        return self._opened

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise MemberLost(f"ranks do not come together: {error}") from error


def _new_group(store: TCPStore, rank: int, num_ranks: int, torch_device: torch.device) -> Any:
    distributed: Any = torch.distributed  # PyTorch's type stubs lack these classes
    if torch_device.type == "cuda":
        # Otherwise a thread of PyTorch's ends the process as soon as a rank is lost, before it is said which.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = _LONGEST
        return distributed.ProcessGroupNCCL(store, rank, num_ranks, options)
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=_HOST)]
    options._timeout = _LONGEST
    return distributed.ProcessGroupGloo(store, rank, num_ranks, options)
