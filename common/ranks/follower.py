"""The process of a rank but the first: loads its part of the model and computes the forwards that the first rank does.

    python -m common.ranks.follower FILE

FILE is the number of an inherited socket to the first rank. The process ends when the socket is closed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import torch
import transformers
from torch import Tensor

from common.cpu_engine import cpu_engine
from common.errors import BatonError
from common.host.peer_process import end_with_peer
from common.host.shared_tensors import TensorPlace, at, mapped
from common.model.loader import load_target
from common.model.part import MemberLost, Part
from common.ranks.leader import error_place, write_error
from common.ranks.messages import Forward, Load, NewFile, NoMorePool, received

_LOST_STATUS = 3


class _Files:
    """The files of shared tensors that the first rank has sent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._memories: list[Tensor] = []

    def receive(self) -> Tensor:
        file = recv_handle(self._connection)
        self._memories.append(mapped(file))
        os.close(file)
        return self._memories[-1]

    def let_go(self) -> None:
        del self._memories[1:]

    def at(self, place: TensorPlace) -> Tensor:
        return at(self._memories[place.file], place)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the first rank gets them too, and ends this one when it is done
        signal.signal(number, signal.SIG_IGN)
    descriptor = int(sys.argv[1])
    connection = Connection(descriptor)
    threading.Thread(target=end_with_peer, args=(descriptor,), name="end", daemon=True).start()
    load, files = connection.recv(), _Files(connection)
    assert isinstance(load, Load) and isinstance(connection.recv(), NewFile)
    memory = files.receive()
    try:
        _serve(load, connection, files, memory)
    except (EOFError, ConnectionResetError):
        pass  # the first rank has closed the socket
    except MemberLost:
        sys.exit(_LOST_STATUS)
    except BatonError as error:
        write_error(error_place(memory, load), str(error))
        sys.exit(1)
    except BaseException as error:
        write_error(error_place(memory, load), f"{type(error).__name__}: {error}")
        raise


def _serve(load: Load, connection: Connection, files: _Files, memory: Tensor) -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(load.num_threads)
    engine = cpu_engine(torch.device("cpu"))
    assert engine is not None, "the first rank has the engine for CPUs"
    engine.keep_kernels(load.kernels_dir)
    collective = engine.new_collective(memory[: load.collective_bytes], rank=load.rank, num_ranks=load.num_ranks)
    target = load_target(load.directory, **load.arguments, part=Part(load.rank, load.num_ranks, collective))
    while True:
        message = connection.recv()
        if isinstance(message, NewFile):
            files.receive()
            continue
        if isinstance(message, NoMorePool):
            files.let_go()
            continue
        assert isinstance(message, Forward)
        target.forward(received(message, files.at))


if __name__ == "__main__":
    main()
