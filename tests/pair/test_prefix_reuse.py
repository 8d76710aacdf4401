"""Tests that reusing the KV of earlier requests, on either side or both, changes no token and no draft.

Conversations are held cold (all KV is computed anew) and warm. Both give the same tokens, and warm ones send and
compute exactly the KV that is not cached.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.kv.pool import KvPool, RowLease
from common.kv.prefix_tree import HeldPrefix, PrefixTree
from common.model.target import TargetModel
from common.prompts.chunk_batch import Chunk, ChunkBatch
from decode_service.schedule import dispatcher
from prefill_service.schedule import scheduler as prefill_scheduler
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


class KeptKv:
    """The KV that engines leave in their caches, with the tokens that it depends on."""

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
    """The draft head's KV is compared too. It also depends on tokens that follow."""
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


# ---- tokens, drafts and counts ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "alone"])
@pytest.mark.parametrize("sides", SIDES)
def test_conversations_are_the_same_cold_and_warm(
    sides: str, at_once: bool, overlap: bool, comparison: Comparison
) -> None:
    """Every pair of values of sides, chunk size, concurrency, overlap and temperature occurs, except for chunks of 512
    where alone all is local: the prefill service has no chunks there.
    """
    is_even = list(SIDES).index(sides) % 2 == 0
    chunk_tokens = 512 if is_even == overlap and (at_once or sides != "local") else 16
    temperature = 0.0 if at_once == overlap else 0.8
    comparison.run("", SIDES[sides], Way(chunk_tokens, at_once=at_once, overlap=overlap, temperature=temperature))


def ways_in_turn(heads: Sequence[str]) -> list[tuple[str, str, str]]:
    """Returns three heads with each of SIDES in one of the four WAYS, and the first head in the way that is left. Every
    pair of values of head, sides and way occurs.
    """
    ways = list(WAYS)
    return [
        (head, sides, ways[(number + place) % len(ways)])
        for number, head in enumerate([*heads, heads[0]])
        for place, sides in enumerate(SIDES)
    ]


@pytest.mark.parametrize(("head", "sides", "way"), ways_in_turn(["eagle3", "eagle3-tree", "nextn-4"]))
def test_drafts_are_the_same_cold_and_warm(head: str, sides: str, way: str, comparison: Comparison) -> None:
    comparison.run(head, SIDES[sides], WAYS[way])


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("head", ["eagle", "nextn", "mimo", "mimo_v2-4"])
def test_so_are_those_of_other_families(head: str, sides: str, comparison: Comparison) -> None:
    comparison.run(head, SIDES[sides], BRANCHING)


@pytest.mark.parametrize("at_once", [False, True], ids=["alone", "at-once"])
@pytest.mark.parametrize("head", ["", "eagle3-tree", "nextn-4"], ids=["no head", "eagle3-tree", "nextn-4"])
def test_what_follows_a_cached_prefix_is_computed_here_in_several_chunks(
    head: str, at_once: bool, comparison: Comparison
) -> None:
    """No replica is ready, and each turn after the first is longer than a chunk."""
    options = PairOptions(prefill_fallback=True, context_tokens=1024, decode_tokens=12_288, prefill_tokens=12_288)
    way = Way(512, at_once=at_once, overlap=True, temperature=0.0)
    bursts = comparison.run(head, options, way, turn_tokens=270)
    later = bursts[len(bursts) // NUM_TURNS :]
    assert all(len(burst.local_chunks) > len(burst.turns) for burst in later)


@pytest.mark.parametrize("head", ["", "eagle3-tree"], ids=["no head", "eagle3-tree"])
def test_and_beside_a_replica_that_would_compute_the_whole_chat(head: str, comparison: Comparison) -> None:
    options = PairOptions(prefill_caches=False, local_prefill_tokens=8)
    way = Way(16, at_once=False, overlap=False, temperature=0.8)
    bursts = comparison.run(head, options, way, turn_tokens=10)
    later = bursts[len(bursts) // NUM_TURNS :]
    assert all(len(burst.local_chunks) > 1 for burst in later)


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


def _lookahead_becomes(patch: pytest.MonkeyPatch, changed: Callable[[int], int]) -> None:
    init = PrefixTree.__init__
    patch.setattr(PrefixTree, "__init__", lambda self, lookahead: init(self, max(changed(lookahead), 0)))


def keys_without_pairs(patch: pytest.MonkeyPatch) -> None:
    """Shares the draft head's KV of a token even with requests that have another token after it."""
    _lookahead_becomes(patch, lambda lookahead: 0)


def one_pair_token_too_few(patch: pytest.MonkeyPatch) -> None:
    _lookahead_becomes(patch, lambda lookahead: lookahead - 1)


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


@pytest.mark.parametrize(
    ("mutant", "head", "sides"),
    [
        *((keys_without_pairs, head, "both") for head in HEADS),
        (keys_without_pairs, "eagle3", "prefill"),
        (keys_without_pairs, "eagle3", "decode"),
        (one_pair_token_too_few, "nextn-4", "both"),
        (one_pair_token_too_few, "mimo_v2-4", "both"),
        *((cached_draft_kv_is_noise, head, "both") for head in ("eagle3", "eagle3-tree", "nextn-4")),
    ],
)
def test_it_is_seen_in_drafts(
    mutant: Mutant, head: str, sides: str, comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="drafts differ"):
        comparison.run(head, SIDES[sides], BRANCHING)


def one_token_fewer_is_held(patch: pytest.MonkeyPatch) -> None:
    hold = PrefixTree.hold

    def mutant(self: PrefixTree, tokens: NDArray[np.int64], namespace: str, max_tokens: int) -> HeldPrefix:
        num_cached = min(self.num_cached(tokens, namespace), max_tokens)
        return hold(self, tokens, namespace, max(num_cached - 1, 0))

    patch.setattr(PrefixTree, "hold", mutant)


def nothing_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    for module in (dispatcher, prefill_scheduler):
        patch.setattr(module, "awaited_kv", lambda pool, key, sources, is_received=False: None)


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


@pytest.mark.parametrize(
    ("mutant", "sides", "symptom"),
    [
        (one_token_fewer_is_held, "both", "decode holds other KV"),
        (one_token_fewer_is_held, "prefill", "prefill found other KV"),
        (one_token_fewer_is_held, "local", "decode found other KV"),
        (nothing_is_waited_for, "both", "decode holds other KV"),
        (nothing_is_waited_for, "prefill", "prefill found other KV"),
        (cached_tokens_are_computed, "prefill", "prefill computed other tokens"),
        (cached_tokens_are_computed, "local", "decode computed other tokens"),
    ],
)
@pytest.mark.parametrize("head", ["", "nextn-4"], ids=["no head", "nextn-4"])
def test_it_is_seen_in_counts(
    head: str, mutant: Mutant, sides: str, symptom: str, comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=symptom):
        comparison.run(head, SIDES[sides], BRANCHING)
