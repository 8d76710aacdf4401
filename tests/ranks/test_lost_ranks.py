"""Tests of a decode service of two ranks under load: a rank that is stopped or killed is named, and nothing is left."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from torch import Tensor

from baton import Completion, errors
from baton.local_pair import LocalPair
from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE
from common.attention.backend import ForwardInput
from common.device.stream import DeviceLost, GraphRecorder
from common.errors import StartupError
from common.kv.kv_shard import WHOLE, KvShard
from common.ranks.leader import Ranks
from common.sampling.params import ResolvedSampling
from tests.support.loading import load_target
from tests.support.pair import MakePair, PairOptions
from tests.support.ranked import ranked_model
from tests.support.running_pair import BOUND_S, RunningPair, running_pair, wait_until

NUM_REQUESTS = 4


@pytest.fixture
def pair(tiny_model_dir: Callable[[str], Path], forked: Callable[..., LocalPair]) -> Iterator[RunningPair]:
    with running_pair(tiny_model_dir("llama"), kind=forked, decode_args=["--tensor-parallel=2"]) as running:
        yield running


def follower_of(pid: int) -> psutil.Process:
    """Returns the process of the second rank of the service `pid`."""
    (rank,) = [child for child in psutil.Process(pid).children() if "common.ranks.follower" in child.cmdline()]
    return rank


@pytest.mark.thorough
def test_a_stopped_rank_is_noticed_and_a_killed_one_ends_the_service(pair: RunningPair) -> None:
    (decode,) = pair.processes.decode
    rank = follower_of(decode.pid)

    def answers(number: int) -> Future[Completion]:
        return clients.submit(
            pair.client.complete,
            token_ids=[10 + number, 11],
            max_tokens=400,
            ignore_eos=True,
            temperature=0.0,
            timeout_s=BOUND_S,
        )

    with ThreadPoolExecutor(NUM_REQUESTS) as clients:
        expected = answers(0).result()
        running = [answers(number) for number in range(NUM_REQUESTS)]
        wait_until(lambda: pair.load().num_running == NUM_REQUESTS, about=pair.load)

        rank.send_signal(signal.SIGSTOP)
        wait_until(lambda: pair.client.health(READY_SERVICE["decode"]) is not HealthStatus.SERVING)
        wait_until(lambda: f'"waits_for": "rank 1 (process {rank.pid})"' in decode.log_tail())
        rank.send_signal(signal.SIGCONT)
        wait_until(pair.is_ready)
        assert [len(each.result().token_ids) for each in running] == [400] * NUM_REQUESTS
        assert running[0].result().token_ids == expected.token_ids

        running = [answers(number) for number in range(NUM_REQUESTS)]
        wait_until(lambda: pair.load().num_running == NUM_REQUESTS, about=pair.load)
        rank.kill()
        for each in running:
            with pytest.raises(errors.Unavailable):
                each.result()
        assert decode.wait(BOUND_S)
        assert f"rank 1 of 2 (process {rank.pid}) was killed by SIGKILL" in decode.log_tail()

        decode.start()
        wait_until(pair.is_ready)
        assert answers(0).result().token_ids == expected.token_ids
    left = follower_of(decode.pid)
    decode.kill()
    assert decode.wait(BOUND_S)
    wait_until(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.parametrize("own_kv_on", [None, "cpu"], ids=["one-pool", "own-kv"])
def test_a_rank_that_ends_while_it_loads_ends_the_start(
    own_kv_on: str | None, tiny_model_dir: Callable[[str], Path]
) -> None:
    def kill(ranks: Ranks) -> None:
        psutil.Process(ranks.pids[0]).kill()

    with (
        pytest.raises(StartupError, match=r"^tensor_parallel: rank 1 of 2 \(process \d+\) was killed by SIGKILL$"),
        ranked_model(tiny_model_dir("llama"), 2, on_start=kill, own_kv_on=own_kv_on),
    ):
        pass


class NotedFollowers:
    """Followers that note what this rank tells them."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def begin(self, batch: ForwardInput) -> None:
        self.told.append(batch)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def kv(self, shape: Sequence[int], dtype: torch.dtype, heads: Sequence[range]) -> Sequence[KvShard]:
        return (KvShard(WHOLE, self.zeros(shape, dtype)),)

    def recorder(self, recorder: GraphRecorder) -> GraphRecorder:
        return recorder

    def share(self, memory: Tensor, file: int) -> None:
        raise AssertionError

    def give_up(self, error: BaseException) -> str:
        self.told.append(error)
        return "rank 0 failed"


def test_a_forward_that_fails_gives_the_other_ranks_up(
    tiny_model_dir: Callable[[str], Path], make_pair: MakePair
) -> None:
    target, followers = load_target(tiny_model_dir("llama"), device="cpu", dtype="float32"), NotedFollowers()
    target.lead(followers)
    pair = make_pair(target, PairOptions())
    pair.submit("fine", [10, 11], ResolvedSampling(seed=0, max_tokens=2))
    pair.run()
    assert followers.told and all(isinstance(each, ForwardInput) for each in followers.told)
    batch = replace(followers.told[-1], input_ids=torch.tensor([10_000]))  # type: ignore[type-var]
    with pytest.raises(DeviceLost, match="rank 0 failed"):
        target.forward(batch)
    assert isinstance(followers.told[-1], IndexError)
