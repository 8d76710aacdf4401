"""The process of each rank except the first: loads its part of the model and computes the first rank's forwards.

    python -m common.ranks.follower FILE

FILE is the number of an inherited socket to the first rank.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import torch
import transformers
from torch import Tensor

from common.device.factory import allow_tf32, open_device
from common.device.stream import Device, Graph, GraphWork
from common.errors import BatonError
from common.host.shared_tensors import TensorPlace, at, mapped
from common.model.loader import load_target
from common.model.part import MemberLost, Part
from common.model.target import TargetModel
from common.ranks.leader import error_place, write_error
from common.ranks.messages import AnnouncedForward, Forward, Load, NewFile, NewKv, NoMorePool, ReplayForward, ToFollower
from common.ranks.one_pool import received
from common.ranks.own_kv import ReceivedForwards
from common.ranks.process_group import GroupCollective, new_store

_LOST_STATUS = 3
_CHECK_INTERVAL_S = 1.0


class ReceivedFiles:
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
    connection = Connection(int(sys.argv[1]))
    load, files = connection.recv(), ReceivedFiles(connection)
    assert isinstance(load, Load) and isinstance(connection.recv(), NewFile)
    memory = files.receive()
    try:
        _serve(load, connection, files, memory)
    except (EOFError, ConnectionResetError):
        pass  # the first rank has ended
    except MemberLost as error:
        write_error(error_place(memory, load), str(error))
        sys.exit(_LOST_STATUS)
    except BatonError as error:
        write_error(error_place(memory, load), str(error))
        sys.exit(1)
    except BaseException as error:
        write_error(error_place(memory, load), f"{type(error).__name__}: {error}")
        raise


def _serve(load: Load, connection: Connection, files: ReceivedFiles, memory: Tensor) -> None:
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(load.num_threads)
    allow_tf32(load.tf32)
    torch_device, counters = torch.device(load.arguments["device"]), memory[: load.collective_bytes]
    if (cpu_engine := load.arguments["cpu_engine"]) is not None:
        cpu_engine.keep_kernels(load.kernels_dir)
    if load.engine is not None:
        collective = load.engine.new_collective(counters, rank=load.rank, num_ranks=load.num_ranks)
        target = load_target(load.directory, **load.arguments, part=Part(load.rank, load.num_ranks, collective))
        _compute(target, connection, files)
        return
    device = open_device(load.arguments["device"], num_threads=load.num_threads)
    group = GroupCollective(
        new_store(load.store_port, num_ranks=load.num_ranks),
        torch_device=torch_device,
        rank=load.rank,
        num_ranks=load.num_ranks,
        counts=counters.view(torch.int64),
    )
    part = Part(load.rank, load.num_ranks, group, has_own_kv=True)
    target = load_target(load.directory, **load.arguments, part=part)
    if torch_device.type == "cuda":
        torch.cuda.empty_cache()  # the first rank looks how much is free
    OwnKvRank(target, connection, files, ReceivedForwards(group, torch_device), device).run()


def _compute(target: TargetModel, connection: Connection, files: ReceivedFiles) -> None:
    while True:
        match connection.recv():
            case NewFile():
                files.receive()
            case NoMorePool(number):
                files.let_go()
                connection.send(number)
            case Forward() as message:
                target.forward(received(message, files.at))
            case other:
                raise AssertionError(f"an unknown message: {other}")


class OwnKvRank:
    """Computes forwards on KV of its own. On a GPU only the first rank waits for forwards, through its own part."""

    def __init__(
        self,
        target: TargetModel,
        connection: Connection,
        files: ReceivedFiles,
        forwards: ReceivedForwards,
        device: Device,
    ) -> None:
        self._target = target
        self._connection = connection
        self._files = files
        self._forwards = forwards
        self._device = device
        self._graphs: dict[int, Graph] = {}

    def run(self) -> None:
        with _stream_of(self._device):
            while True:
                while not self._connection.poll(_CHECK_INTERVAL_S):
                    self._check_gpu()
                self._do(self._connection.recv())  # keeps no reference: a shard is freed with its last reference

    def _check_gpu(self) -> None:
        """Raises a failed kernel's error, since nothing here waits for kernels."""
        if self._device.torch_device.type == "cuda":
            torch.cuda.current_stream().query()

    def _do(self, message: ToFollower) -> None:
        match message:
            case NewFile():
                self._files.receive()
            case NewKv(kv):
                self._forwards.add(kv if isinstance(kv, Tensor) else self._files.at(kv))
            case NoMorePool(number):
                self._graphs.clear()
                self._forwards.let_go()
                self._files.let_go()
                if self._device.torch_device.type == "cuda":
                    torch.cuda.empty_cache()  # the first rank looks how much is free
                self._connection.send(number)
            case AnnouncedForward(graph=None):
                self._compute(message)
            case AnnouncedForward(graph=int(number)):
                self._graphs[number] = _new_graph(self._device)
                self._graphs[number].record(partial(self._compute, message))
            case ReplayForward(number):
                self._forwards.note_replay()
                self._graphs[number].replay()
            case other:
                raise AssertionError(f"an unknown message: {other}")

    def _compute(self, message: AnnouncedForward) -> tuple[Tensor, ...]:
        return (self._target.forward(self._forwards.receive(message)).logits,)


def _stream_of(device: Device) -> AbstractContextManager[object]:
    if device.torch_device.type == "cpu":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device.torch_device))


def _new_graph(device: Device) -> Graph:
    return _CalledAgain() if device.graphs is None else device.graphs.new_graph()


class _CalledAgain(Graph):
    """Replaces graphs on a CPU, which has none: a replay computes the work again."""

    def record(self, work: GraphWork) -> tuple[Tensor, ...]:
        self._work = work
        return work()

    def replay(self) -> None:
        self._work()


if __name__ == "__main__":
    main()
