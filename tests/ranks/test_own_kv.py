"""Tests of ranks that each have KV of their own, as on GPUs. Here they are processes on the CPU, connected by gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.device.stream import DeviceLost, Graph, GraphRecorder, GraphWork
from common.errors import StartupError
from common.ranks import leader
from common.ranks.leader import Ranks, devices_of
from common.ranks.messages import AnnouncedForward, ReplayForward
from common.ranks.process_group import new_store
from common.sampling.params import ResolvedSampling
from tests.support.draft_heads import save_copy_head
from tests.support.loading import load_draft
from tests.support.models import save_last_token_model
from tests.support.pair import InProcessPair, MakePair, PairOptions
from tests.support.ranked import ranked_model
from tests.support.recording_device import RecordingCpuDevice
from tests.support.running_pair import BOUND_S, wait_until

NUM_REQUESTS = 4
CHAIN: dict[str, Any] = {"num_draft_tokens": 3}


def tokens_of(pair: InProcessPair, num_tokens: int = 12) -> list[list[int]]:
    outcomes = [
        pair.submit(
            str(number),
            [4 + (5 * number + place) % 50 for place in range(2 + 5 * number)],
            ResolvedSampling(seed=number, max_tokens=num_tokens - number, temperature=0.7 * (number % 2)),
        )
        for number in range(NUM_REQUESTS)
    ]
    pair.run()
    return [outcome.token_ids for outcome in outcomes]


def announced(messages: Sequence[object]) -> list[AnnouncedForward]:
    return [each for each in messages if isinstance(each, AnnouncedForward)]


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["llama", "phi3, windows"])
def test_the_other_ranks_replay_what_the_first_one_replays_over_each_pool(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's forwards are recorded by all ranks, and those of the draft head by the first alone."""
    sent: list[object] = []
    dumps = ForkingPickler.dumps

    def noting_dumps(message: object) -> memoryview:
        sent.append(message)
        return dumps(message)

    monkeypatch.setattr(ForkingPickler, "dumps", noting_dumps)
    weights = {"context_weight": 0.05, "mlp_weight": 0.05}
    directory = save_last_token_model(tmp_path / "target", architecture=architecture, **weights)
    head_dir = save_copy_head(tmp_path / "head", target_dir=directory, family="eagle3")
    with ranked_model(directory, 2, own_kv_on="cpu") as (target, ranks):
        head = load_draft(head_dir, target=target, device="cpu", dtype="float32")
        target.capture_hidden(head.capture)
        seen = []
        for replays in (False, True, True):
            sent.clear()
            options = PairOptions(decode_rows=4, replays_forwards=replays, **CHAIN)
            pair = InProcessPair(target, new_device=RecordingCpuDevice, draft=head, options=options)
            try:
                recorded = {each.graph for each in announced(sent) if each.graph is not None}
                assert bool(recorded) == replays == bool(pair.decode.recorded)
                sent.clear()
                seen.append(tokens_of(pair))
                if pair.decode.recorded is not None:
                    assert len(recorded) < pair.decode.recorded.num_graphs, "the draft head's are not theirs"
                    replayed = [each.graph for each in sent if isinstance(each, ReplayForward)]
                    assert len(replayed) == len(pair.decode_steps) and set(replayed) <= recorded
                    assert len(announced(sent)) == len(pair.prefill_steps), "only prompts are not replayed"
                    assert {each.graph for each in announced(sent)} == {None}
                pair.settle()
            finally:
                pair.close()
            assert ranks.behind == "" and ranks.loss is None
            ranks.let_go_of_pool()
        assert seen[0] == seen[1] == seen[2]


def begun_forwards(monkeypatch: pytest.MonkeyPatch) -> list[ForwardInput]:
    """Returns a list that gets each forward of which ranks are told."""
    begun: list[ForwardInput] = []
    begin = Ranks.begin

    def noting(ranks: Ranks, batch: ForwardInput) -> None:
        begun.append(batch)
        begin(ranks, batch)

    monkeypatch.setattr(Ranks, "begin", noting)
    return begun


@pytest.mark.thorough
def test_a_rank_that_stops_or_ends_is_named(
    tiny_model_dir: Callable[[str], Path], make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = begun_forwards(monkeypatch)
    with ranked_model(tiny_model_dir("llama"), 3, own_kv_on="cpu") as (target, ranks):
        pair = make_pair(target, PairOptions())
        assert all(tokens_of(pair))
        pair.settle()
        assert ranks.behind == "" and ranks.loss is None

        rank = psutil.Process(ranks.pids[1])
        rank.suspend()
        with ThreadPoolExecutor(1) as thread:
            forward = thread.submit(target.forward, begun[-1])
            wait_until(lambda: ranks.behind == f"rank 2 (process {rank.pid})")
            assert not forward.done()
            rank.resume()
            assert torch.isfinite(forward.result(BOUND_S).logits).all()

        rank.kill()
        lost = rf"^rank 2 of 3 \(process {ranks.pids[1]}\) was killed by SIGKILL$"
        with pytest.raises(DeviceLost, match=lost):
            target.forward(begun[-1])
        assert ranks.loss is not None


class RanOut(Graph):
    """A graph that can be recorded, and cannot be replayed."""

    def record(self, work: GraphWork) -> tuple[Tensor, ...]:
        return work()

    def replay(self) -> None:
        raise RuntimeError("no memory")


class RanOutRecorder(GraphRecorder):
    def new_graph(self) -> Graph:
        return RanOut()

    def held_bytes(self) -> int:
        return 0


@pytest.mark.thorough
def test_a_replay_that_fails_on_the_first_rank_gives_the_others_up(
    tiny_model_dir: Callable[[str], Path], make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others have begun theirs by then, and nobody waits for them any more."""
    begun = begun_forwards(monkeypatch)
    with ranked_model(tiny_model_dir("llama"), 2, own_kv_on="cpu") as (target, ranks):
        assert all(tokens_of(make_pair(target, PairOptions()), num_tokens=5))
        graph = target.recorder(RanOutRecorder()).new_graph()
        graph.record(lambda: (target.forward(begun[-1]).logits,))
        failed = "rank 0 failed in a forward: RuntimeError: no memory"
        with pytest.raises(DeviceLost, match=f"^{failed}$"):
            graph.replay()
        assert ranks.loss == failed

        def have_answered(*_: object) -> bool:
            raise AssertionError("ranks that are lost do not answer")

        monkeypatch.setattr(leader, "have_answered", have_answered)
        ranks.let_go_of_pool()


def test_too_few_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert devices_of(torch.device("cuda", 1), 2) == [torch.device("cuda", 1), torch.device("cuda", 2)]
    assert devices_of(torch.device("cpu"), 2) == [torch.device("cpu")] * 2
    with pytest.raises(StartupError, match=r"^tensor_parallel: 3 GPUs from number 1 on are needed; 3 are there$"):
        devices_of(torch.device("cuda", 1), 3)


def test_the_ranks_find_each_other_on_the_loopback_interface_only() -> None:
    store = new_store(None, num_ranks=2)
    (listening,) = [
        each.laddr.ip
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == store.port
    ]
    assert listening == "127.0.0.1"
