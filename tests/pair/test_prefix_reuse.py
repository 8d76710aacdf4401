"""KV of earlier requests, on either side or both, changes no token and no draft: conversations are the same cold and
warm, and what is sent and computed is exactly what is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.kv.pool import KvPool, RowLease
from common.model.target import TargetModel
from tests.support.conversations import SIDES, compare, hold, talks
from tests.support.drafted import Drafted
from tests.support.pair import MakePair


class KeptKv:
    """The KV that engines leave in their caches, by the tokens it depends on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_tokens: dict[tuple[int, ...], list[dict[str, Tensor]]] = {}
        keep = KvPool.keep

        def recording(pool: KvPool, lease: RowLease, token_ids: NDArray[np.int64], num_tokens: int) -> None:
            lookahead = pool.groups["draft"].num_layers if "draft" in pool.groups else 0
            num_tokens = min(num_tokens, len(token_ids) - lookahead)
            slots = torch.from_numpy(lease.slots[:num_tokens])
            kv = {name: buffer[:, :, slots].clone() for name, buffer in pool.buffers.items()}
            self.by_tokens.setdefault(tuple(token_ids[: num_tokens + lookahead].tolist()), []).append(kv)
            keep(pool, lease, token_ids, num_tokens)

        monkeypatch.setattr(KvPool, "keep", recording)

    def take(self) -> dict[tuple[int, ...], list[dict[str, Tensor]]]:
        taken, self.by_tokens = self.by_tokens, {}
        return taken


@pytest.mark.parametrize("head", ["guessing", "guessing_layers"])
def test_cached_kv_is_what_a_new_prefill_computes(
    head: str, make_pair: MakePair, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of the draft head, which depends on tokens that follow."""
    drafted: Drafted = request.getfixturevalue(head)
    every = talks(4, drafted.target.vocab_size)
    kept = KeptKv(monkeypatch)
    hold(make_pair(drafted.target, draft=drafted.head), every, salt=lambda name: name, at_once=False)
    cold = kept.take()
    again = [replace(talk, turns=[]) for talk in every]
    hold(make_pair(drafted.target, draft=drafted.head), again, salt=lambda _name: "", at_once=False)
    warm = kept.take()
    assert warm.keys() <= cold.keys() and len(warm) > 2 * len(every)
    for tokens, kept_kv in warm.items():
        for kv in kept_kv:
            for name, values in kv.items():
                torch.testing.assert_close(values, cold[tokens][0][name], rtol=1e-4, atol=1e-4)
    assert sum(turn.num_cached for talk in again for turn in talk.turns) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("at_once", [False, True], ids=["alone", "at-once"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("chunk_tokens", [16, 512])
@pytest.mark.parametrize("sides", SIDES)
def test_conversations_are_the_same_cold_and_warm(
    sides: str,
    chunk_tokens: int,
    overlap: bool,
    at_once: bool,
    temperature: float,
    make_pair: MakePair,
    tiny_target: Callable[[str], TargetModel],
) -> None:
    model = tiny_target("llama")
    options = replace(SIDES[sides], overlap=overlap, chunk_tokens=chunk_tokens)
    every = talks(16 if at_once else 3, model.vocab_size, temperature=temperature)
    compare(lambda options: make_pair(model, options), options, every, at_once=at_once)


@pytest.mark.parametrize("at_once", [False, True], ids=["alone", "at-once"])
@pytest.mark.parametrize("chunk_tokens", [16, 512])
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("head", ["leaning", "tree", "leaning_layers"])
def test_drafts_are_the_same_cold_and_warm(
    head: str,
    sides: str,
    chunk_tokens: int,
    at_once: bool,
    make_pair: MakePair,
    request: pytest.FixtureRequest,
) -> None:
    drafted: Drafted = request.getfixturevalue("leaning" if head == "tree" else head)
    options = replace(SIDES[sides], chunk_tokens=chunk_tokens)
    if head == "tree":
        options = replace(options, draft_topk=2, num_draft_steps=3, num_draft_tokens=6)
    every = talks(16 if at_once else 3, drafted.target.vocab_size)
    warm = compare(
        lambda options: make_pair(drafted.target, options, draft=drafted.head), options, every, at_once=at_once
    )
    assert sum(sum(turn.accepted_at) for turn in warm) > len(warm), "few drafts were accepted"
