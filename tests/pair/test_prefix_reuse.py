"""Tests that reusing the KV of earlier requests, on either side or both, changes no token and no draft.

Conversations are held cold (all KV is computed anew) and warm. Both give the same tokens, and warm ones send and
compute exactly the KV that is not cached.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.kv.pool import KvPool, RowLease
from common.kv.prefix_tree import HeldPrefix, PrefixTree
from common.model.target import TargetModel
from common.prompts.chunk_batch import Chunk, ChunkBatch
from tests.pair.speculation_mutants import Mutant
from tests.support.conversations import (
    NUM_SHARED,
    NUM_TURNS,
    SIDES,
    Burst,
    MakeForOptions,
    Talk,
    compare,
    hold,
    hold_cold,
    talks,
)
from tests.support.draft_heads import save_copy_head
from tests.support.drafted import Drafted, load_drafted
from tests.support.pair import InProcessPair, MakePair, PairOptions


@dataclass(frozen=True, slots=True)
class Head:
    """A kind of draft head: its family, its number of layers, and the shape of its drafts."""

    family: str
    num_layers: int = 1
    drafts: dict[str, int] = field(default_factory=dict)


TREE = {"draft_topk": 2, "num_draft_steps": 3, "num_draft_tokens": 6}
HEADS = {
    "eagle": Head("eagle"),
    "eagle3": Head("eagle3"),
    "eagle3-tree": Head("eagle3", drafts=TREE),
    "nextn": Head("nextn"),
    "mimo": Head("mimo"),
    "nextn-4": Head("nextn", num_layers=4),
    "mimo_v2-4": Head("mimo_v2", num_layers=4),
}


@dataclass(frozen=True, slots=True)
class Way:
    """A way to hold conversations: one request at a time or 16 at once, and the engines' options."""

    chunk_tokens: int
    at_once: bool
    overlap: bool
    temperature: float


WAYS = {
    "16-alone-overlap-greedy": Way(16, at_once=False, overlap=True, temperature=0.0),
    "16-at-once-no-overlap-greedy": Way(16, at_once=True, overlap=False, temperature=0.0),
    "512-alone-no-overlap-sampled": Way(512, at_once=False, overlap=False, temperature=0.8),
    "512-at-once-overlap-sampled": Way(512, at_once=True, overlap=True, temperature=0.8),
}
BRANCHING = WAYS["16-at-once-no-overlap-greedy"]
"""With these options, 15 of the conversations branch off right after a cached token."""

Swayed = Callable[[str], Drafted]


@pytest.fixture(scope="module")
def swayed(leaning_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Swayed:
    """A function that loads a head of HEADS, by its name, with its target. Its guesses depend on its own KV of all
    tokens, and some are accepted.
    """

    @cache
    def load(name: str) -> Drafted:
        head = HEADS[name]
        directory = save_copy_head(
            tmp_path_factory.mktemp(name),
            target_dir=leaning_model_dir,
            family=head.family,
            num_layers=head.num_layers,
            is_swayed=True,
        )
        return load_drafted(leaning_model_dir, directory)

    return load


Cold = dict[object, list[Talk]]


@pytest.fixture(scope="module")
def cold() -> Cold:
    """The conversations that were held without cached KV so far, by model and way. Later comparisons use them again."""
    return {}


@dataclass(frozen=True, slots=True)
class Comparison:
    """Compares conversations held with cached KV (warm) and without (cold). If `head` is empty, the model is a tiny
    Llama.
    """

    make_pair: MakePair
    tiny_target: Callable[[str], TargetModel]
    swayed: Swayed
    cold: Cold

    def target(self, head: str) -> TargetModel:
        return self.swayed(head).target if head else self.tiny_target("llama")

    def make(self, head: str, options: PairOptions, way: Way) -> InProcessPair:
        """Makes a pair with `options`, and with those that follow from `head` and `way`. With `prefill_fallback` the
        pair loses its replica, and the clock makes decode compute all prompts without a wait.
        """
        drafts = HEADS[head].drafts if head else {}
        pair = self.make_pair(
            self.target(head),
            replace(options, overlap=way.overlap, chunk_tokens=way.chunk_tokens, **drafts),
            draft=self.swayed(head).head if head else None,
            clock=itertools.count().__next__ if options.prefill_fallback else time.monotonic,
        )
        if options.prefill_fallback:
            pair.replicas[0].lose()
            pair.step_decode()
        return pair

    def hold_cold(self, head: str, options: PairOptions, way: Way, **talk: int) -> list[Talk]:
        """Holds the conversations cold, unless that was done before. `talk` are further arguments of `talks`."""
        key = (head, way, *talk.items())
        if key not in self.cold:
            vocab_size = self.target(head).vocab_size
            every = talks(16 if way.at_once else 3, vocab_size, temperature=way.temperature, **talk)
            self.cold[key] = hold_cold(self._maker(head, way), options, every, at_once=way.at_once)
        return self.cold[key]

    def run(self, head: str, options: PairOptions, way: Way, **talk: int) -> list[Burst]:
        """Holds conversations with these options, and compares them with cold ones. `talk` are further arguments of
        `talks`.
        """
        cold = self.hold_cold(head, options, way, **talk)
        bursts = compare(self._maker(head, way), options, cold, at_once=way.at_once)
        turns = [turn for burst in bursts for turn in burst.turns]
        assert not head or sum(sum(turn.accepted_at) for turn in turns) > len(bursts[0].turns), "few were accepted"
        return bursts

    def _maker(self, head: str, way: Way) -> MakeForOptions:
        return lambda options: self.make(head, options, way)


@pytest.fixture
def comparison(
    make_pair: MakePair, tiny_target: Callable[[str], TargetModel], swayed: Swayed, cold: Cold
) -> Comparison:
    return Comparison(make_pair, tiny_target, swayed, cold)


thorough = pytest.mark.thorough


IN_GATE = {("", "both"), ("nextn-4", "both"), ("eagle3-tree", "local")}


def ways_in_turn() -> Iterator[Any]:
    """Yields each head with each of SIDES, in one of the four WAYS. Every pair of values of sides and way occurs."""
    for number, head in enumerate(["", *HEADS]):
        for place, sides in enumerate(SIDES):
            way = list(WAYS)[(number + place) % len(WAYS)]
            yield pytest.param(head, sides, way, marks=[] if (head, sides) in IN_GATE else [thorough])


@pytest.mark.parametrize(("head", "sides", "way"), list(ways_in_turn()))
def test_conversations_are_the_same_cold_and_warm(head: str, sides: str, way: str, comparison: Comparison) -> None:
    """Without a head, and with one of every family, in chains, trees and layers."""
    comparison.run(head, SIDES[sides], WAYS[way])


@thorough
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("head", ["", "eagle3-tree", "nextn-4"], ids=["no head", "eagle3-tree", "nextn-4"])
def test_conversations_that_branch_off_behind_a_cached_token_are_so_too(
    head: str, sides: str, comparison: Comparison
) -> None:
    comparison.run(head, SIDES[sides], BRANCHING)


@thorough
@pytest.mark.parametrize("at_once", [False, True], ids=["alone", "at-once"])
@pytest.mark.parametrize("head", ["", "eagle3-tree", "nextn-4"], ids=["no head", "eagle3-tree", "nextn-4"])
def test_what_follows_a_cached_prefix_is_computed_here_in_several_chunks(
    head: str, at_once: bool, comparison: Comparison
) -> None:
    """No replica is ready, and each turn after the first is longer than a chunk."""
    options = PairOptions(prefill_fallback=True, context_tokens=1024, decode_tokens=12_288, prefill_tokens=12_288)
    way = Way(512, at_once=at_once, overlap=True, temperature=0.0)
    check_later_turns_take_several_chunks(comparison.run(head, options, way, turn_tokens=270))


@thorough
@pytest.mark.parametrize("head", ["", "eagle3-tree"], ids=["no head", "eagle3-tree"])
def test_and_beside_a_replica_that_would_compute_the_whole_chat(head: str, comparison: Comparison) -> None:
    options = PairOptions(prefill_caches=False, local_prefill_tokens=8)
    way = Way(16, at_once=False, overlap=False, temperature=0.8)
    check_later_turns_take_several_chunks(comparison.run(head, options, way, turn_tokens=10))


def check_later_turns_take_several_chunks(bursts: Sequence[Burst]) -> None:
    later = bursts[len(bursts) // NUM_TURNS :]
    assert all(len(burst.local_chunks) > len(burst.turns) for burst in later)


@thorough
@pytest.mark.parametrize(("head", "overlap"), [("eagle3-tree", True), ("nextn-4", False)])
def test_retracted_requests_come_back_to_what_is_cached(head: str, overlap: bool, comparison: Comparison) -> None:
    way = Way(16, at_once=True, overlap=overlap, temperature=0.0)
    cold = comparison.hold_cold(head, PairOptions(decode_tokens=8192), way, new_tokens=40)
    warm = [replace(talk, turns=[]) for talk in cold]
    pair = comparison.make(head, PairOptions(decode_tokens=500), way)
    bursts = hold(pair, warm, salt=lambda _name: "", at_once=True)
    assert [talk.answers for talk in warm] == [talk.answers for talk in cold]
    returned = [row for burst in bursts for row in burst.rows if len(row.token_ids) > row.prompt_len]
    assert returned and pair.decode.load().num_retractions >= len(returned)
    num_shared = NUM_SHARED - pair.decode.pool.groups["draft"].num_layers  # other rows hold these meanwhile
    assert all(dict(row.num_held_tokens)["target"] >= num_shared for row in returned)


# ---- removing one rule at a time --------------------------------------------------------------------------------


def one_pair_token_too_few(patch: pytest.MonkeyPatch) -> None:
    """Shares the draft head's KV of a token even with requests that have another token after those its layers read."""
    init = PrefixTree.__init__
    patch.setattr(PrefixTree, "__init__", lambda self, lookahead: init(self, max(lookahead - 1, 0)))


def cached_draft_kv_is_noise(patch: pytest.MonkeyPatch) -> None:
    keep = KvPool.keep

    def mutant(pool: KvPool, lease: RowLease, token_ids: NDArray[np.int64], num_tokens: int) -> None:
        if lease.prefix is None:
            return
        num_kept = lease.prefix.num_tokens
        keep(pool, lease, token_ids, num_tokens)
        slots = torch.from_numpy(lease.prefix.slots()[num_kept:])
        kv = pool.buffers["draft"]
        kv[:, :, slots] = torch.randn(kv[:, :, slots].shape, generator=torch.Generator().manual_seed(1))

    patch.setattr(KvPool, "keep", mutant)


def one_token_fewer_is_held(patch: pytest.MonkeyPatch) -> None:
    hold = PrefixTree.hold

    def mutant(self: PrefixTree, tokens: NDArray[np.int64], namespace: str, max_tokens: int) -> HeldPrefix:
        num_cached = min(self.match(tokens, namespace).num_tokens, max_tokens)
        return hold(self, tokens, namespace, max(num_cached - 1, 0))

    patch.setattr(PrefixTree, "hold", mutant)


def cached_tokens_are_computed(patch: pytest.MonkeyPatch) -> None:
    """Computes a prompt's last cached token once more, in the prompt's first chunk."""
    of = ChunkBatch.of

    def mutant(chunks: Sequence[Chunk[Any]], **options: Any) -> ChunkBatch[Any]:
        return of(
            [
                replace(chunk, start=chunk.start - (0 < chunk.start == chunk.prompt.lease.num_cached))
                for chunk in chunks
            ],
            **options,
        )

    patch.setattr(ChunkBatch, "of", mutant)


@thorough
@pytest.mark.parametrize(
    ("mutant", "head", "sides", "symptom"),
    [
        (one_pair_token_too_few, "eagle3", "decode", "drafts differ"),
        (one_pair_token_too_few, "mimo_v2-4", "prefill", "drafts differ"),
        (cached_draft_kv_is_noise, "eagle3-tree", "both", "drafts differ"),
        (one_token_fewer_is_held, "nextn-4", "both", "decode holds other KV"),
        (one_token_fewer_is_held, "", "prefill", "prefill found other KV"),
        (one_token_fewer_is_held, "", "local", "decode found other KV"),
        (cached_tokens_are_computed, "", "prefill", "prefill computed other tokens"),
        (cached_tokens_are_computed, "nextn-4", "local", "decode computed other tokens"),
    ],
)
def test_it_is_seen(
    mutant: Mutant,
    head: str,
    sides: str,
    symptom: str,
    comparison: Comparison,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=symptom):
        comparison.run(head, SIDES[sides], BRANCHING)
