"""Tests of ranks that each have KV of their own, as on GPUs. Here they are processes on the CPU, connected by gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from common.attention.backend import ForwardInput
from common.device.errors import DeviceLost
from common.draft.load import load_draft
from common.errors import StartupError
from common.ranks.leader import Ranks, devices_of
from common.ranks.messages import AnnouncedForward, Replay, ToFollower
from common.sampling.params import ResolvedSampling
from tests.support.draft_heads import save_copy_head
from tests.support.models import save_last_token_model
from tests.support.pair import InProcessPair, MakePair, PairOptions
from tests.support.ranked import ranked_model
from tests.support.recording_device import RecordingCpuDevice
from tests.support.running_pair import BOUND_S, wait_until

NUM_REQUESTS = 4
CHAIN = {"num_draft_tokens": 3}


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


def test_the_other_ranks_replay_the_forwards_that_the_first_one_replays(
    make_pair: MakePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's forwards are recorded by all ranks, and those of the draft head by the first alone."""
    sent: list[ToFollower] = []
    send = Ranks._send

    def noting(ranks: Ranks, message: ToFollower) -> None:
        sent.append(message)
        send(ranks, message)

    monkeypatch.setattr(Ranks, "_send", noting)
    directory = save_last_token_model(tmp_path / "target", context_weight=0.05, mlp_weight=0.05)
    head_dir = save_copy_head(tmp_path / "head", target_dir=directory, family="eagle3")
    with ranked_model(directory, 2, own_kv_on="cpu") as (target, ranks):
        head = load_draft(head_dir, target=target, device="cpu", dtype="float32")
        target.capture_hidden(head.capture)
        plain = make_pair(target, PairOptions(decode_rows=4, **CHAIN, replays_forwards=False), draft=head)
        expected = tokens_of(plain)
        sent.clear()
        devices = [RecordingCpuDevice(), RecordingCpuDevice()]
        pair = make_pair(target, PairOptions(decode_rows=4, **CHAIN), draft=head, new_device=iter(devices).__next__)
        assert pair.decode.recorded is not None
        recorded = [message.graph for message in sent if isinstance(message, AnnouncedForward) and message.graph]
        assert 0 < len(recorded) < pair.decode.recorded.num_graphs, "graphs with a forward of the target, and without"
        sent.clear()
        assert tokens_of(pair) == expected
        assert ranks.behind == ""
        replays = [message.graph for message in sent if isinstance(message, Replay)]
        assert len(replays) >= len(pair.decode_steps) and set(replays) <= set(recorded)
        assert devices[0].recorder.num_replays > len(replays), "the draft head's were replayed too"
        pair.settle()
        plain.settle()


def test_a_rank_that_stops_or_ends_is_named(
    tiny_model_dir: Callable[[str], Path], make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[ForwardInput] = []
    begin = Ranks.begin

    def noting(ranks: Ranks, batch: ForwardInput) -> None:
        begun.append(batch)
        begin(ranks, batch)

    monkeypatch.setattr(Ranks, "begin", noting)
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


def test_too_few_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert devices_of(torch.device("cuda", 1), 2) == [torch.device("cuda", 1), torch.device("cuda", 2)]
    assert devices_of(torch.device("cpu"), 2) == [torch.device("cpu")] * 2
    with pytest.raises(StartupError, match=r"^tensor_parallel: 3 GPUs from number 1 on are needed; 3 are there$"):
        devices_of(torch.device("cuda", 1), 3)
