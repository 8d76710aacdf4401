"""Holds conversations with a pair, cold and warm, and compares them: tokens, drafts, and what was cached, computed and
sent.

A conversation is held cold if all its KV is computed anew, and warm if services reuse the KV of earlier turns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import pytest
from torch import Tensor

from common.prompts.chunk_batch import ChunkBatch
from common.sampling.params import ResolvedSampling
from common.wire.handoff import Frame, HandoffRow, KvSegment
from decode_service.forward.eagle_drafter import EagleDrafter, MultiLayerEagleDrafter
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.speculate.spec_info import DraftTree
from tests.support.pair import InProcessPair, PairOptions

NUM_TURNS = 3
NEW_TOKENS = 9
NUM_SHARED = 30
SIDES = {
    "both": PairOptions(),
    "prefill": PairOptions(decode_caches=False),
    "decode": PairOptions(prefill_caches=False),
    "local": PairOptions(local_prefill_tokens=40),
}

Tokens = tuple[int, ...]
Nodes = tuple[tuple[int, int], ...]
"""The drafts of one row in one step: each draft's token, and its parent node."""


@dataclass
class Turn:
    """One finished request of a conversation: its prompt and output, some counts, and its drafts by the position of the
    token that they follow.
    """

    name: str
    prompt: Tokens
    token_ids: Tokens
    accepted_at: Tokens
    drafts: dict[int, Nodes]
    num_cached: int
    kv_bytes: int


@dataclass
class Burst:
    """Requests that were sent at once, in this order, with their rows as they were handed over, and the cost of all of
    them.

    `num_prefilled` counts the prompt tokens that the prefill service computed, and `bytes_sent` the bytes of KV that
    left it. `local_chunks` has the number of prompt tokens of each forward in which the decode service computed some.
    """

    turns: list[Turn] = field(default_factory=list)
    rows: list[HandoffRow] = field(default_factory=list)
    num_prefilled: int = 0
    bytes_sent: int = 0
    local_chunks: list[int] = field(default_factory=list)


@dataclass
class Talk:
    """A conversation. Each prompt is everything said before it, followed by the next entry of `says`."""

    sampling: ResolvedSampling
    says: list[Tokens]
    turns: list[Turn] = field(default_factory=list)

    @property
    def next_prompt(self) -> Tokens:
        said = (*self.turns[-1].prompt, *self.turns[-1].token_ids) if self.turns else ()
        return (*said, *self.says[len(self.turns)])

    @property
    def answers(self) -> list[Tokens]:
        return [turn.token_ids for turn in self.turns]


def talks(
    number: int,
    vocab_size: int,
    *,
    temperature: float = 0.0,
    turn_tokens: int = 3,
    new_tokens: int = NEW_TOKENS,
) -> list[Talk]:
    """Returns `number` conversations that begin with the same NUM_SHARED tokens and then differ. Each later turn says
    `turn_tokens` to `turn_tokens` + 4 more tokens, and each answer has `new_tokens`.
    """
    draw = random.Random(11)

    def says(size: int) -> Tokens:
        return tuple(draw.randrange(2, vocab_size) for _ in range(size))

    system = says(NUM_SHARED)
    return [
        Talk(
            ResolvedSampling(seed=seed, max_tokens=new_tokens, temperature=temperature),
            [
                (*system, 2 + seed, *says(4 + seed % 4)),
                *(says(turn_tokens + (seed + turn) % 5) for turn in range(NUM_TURNS - 1)),
            ],
        )
        for seed in range(number)
    ]


# ---- holding them -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The drafts of one step. `rows` [B] are its pool rows, and `roots` [B] the positions of the tokens that the drafts
    follow. `token_ids` and `parents` [B, D] describe the drafts.
    """

    rows: Tensor
    roots: Tensor
    token_ids: Tensor
    parents: Tensor

    def each(self) -> Iterator[tuple[int, int, Nodes]]:
        """Yields each row with the position of its root (the token that the drafts follow) and its nodes."""
        columns = (self.rows, self.roots, self.token_ids, self.parents)
        for row, root, token_ids, parents in zip(*(column.tolist() for column in columns), strict=True):
            yield row, root, tuple(zip(token_ids, parents, strict=True))


@contextmanager
def drafts_noted() -> Iterator[list[StepDrafts]]:
    """Yields a list that collects the drafts of every step, without making the step wait for its results."""
    noted: list[StepDrafts] = []

    def watch(patch: pytest.MonkeyPatch, drafter: type[EagleDrafter | MultiLayerEagleDrafter]) -> None:
        draft = drafter.draft

        def watched(self: Any, batch: ForwardBatch, *given: Any) -> DraftTree:
            tree = draft(self, batch, *given)
            columns = (batch.req_pool_indices, batch.prefix_lens, tree.token_ids, tree.parents)
            noted.append(StepDrafts(*(column.clone() for column in columns)))
            return tree

        patch.setattr(drafter, "draft", watched)

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, EagleDrafter)
        watch(patch, MultiLayerEagleDrafter)
        yield noted


@contextmanager
def local_chunks_noted(pair: InProcessPair) -> Iterator[list[tuple[int, int]]]:
    """Yields a list that collects two numbers of each forward in which the decode service computes prompts: that of its
    tokens, and that of the requests that run meanwhile.
    """
    noted: list[tuple[int, int]] = []
    of = ChunkBatch.of

    def watched(*given: Any, **named: Any) -> ChunkBatch[Any]:
        batch: ChunkBatch[Any] = of(*given, **named)
        if named["pool"] is pair.decode.pool:
            noted.append((batch.num_tokens, pair.decode.load().num_running))
        return batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkBatch, "of", watched)
        yield noted


def hold(
    pair: InProcessPair, every: Sequence[Talk], *, salt: Callable[[str], str | None], at_once: bool
) -> list[Burst]:
    """Runs all turns of the conversations, one request at a time, or at once one request of each conversation. `salt`
    maps a request's name to its cache salt.
    """
    groups = [every] if at_once else [[talk] for talk in every]
    return [_burst(pair, group, turn, salt) for turn in range(NUM_TURNS) for group in groups]


def _burst(pair: InProcessPair, group: Sequence[Talk], turn: int, salt: Callable[[str], str | None]) -> Burst:
    burst = Burst()
    asked = {f"{id(talk)}-{turn}": talk for talk in group}
    prompts = {name: talk.next_prompt for name, talk in asked.items()}
    owners: dict[int, str] = {}
    drafted: list[tuple[StepDrafts, dict[int, str]]] = []
    num_rows, num_steps = len(pair.handed_over), len(pair.prefill_steps)

    def all_ended() -> bool:
        while noted:  # before a row has another owner, all steps of the one before are noted
            drafted.append((noted.pop(0), dict(owners)))
        for request in pair.decode.lives.requests.values():
            if request.lease is not None:
                owners[request.lease.row] = request.request_id
        return all(pair.outcomes[name].has_ended for name in asked)

    def count(frame: Frame) -> Sequence[Frame]:
        burst.bytes_sent += frame.num_bytes if isinstance(frame, KvSegment) else 0
        return (frame,)

    pair.tamper = count
    with drafts_noted() as noted, local_chunks_noted(pair) as chunks:
        for name, talk in asked.items():
            pair.submit(name, prompts[name], talk.sampling, cache_salt=salt(name))
        pair.run(until=all_ended)
        pair.settle()
    drafted += [(step, owners) for step in noted]
    drafts = [(owner[row], root, nodes) for step, owner in drafted for row, root, nodes in step.each()]
    burst.rows = pair.handed_over[num_rows:]
    burst.num_prefilled = sum(step.num_tokens for step in pair.prefill_steps[num_steps:])
    burst.local_chunks = [num_tokens for num_tokens, _ in chunks]
    for name, talk in asked.items():
        outcome = pair.outcomes[name]
        assert outcome.finished is not None, outcome.error
        speculation, timings = outcome.finished.speculation, outcome.finished.timings
        num_tokens = len(prompts[name]) + len(outcome.token_ids)
        talk.turns.append(
            Turn(
                name,
                prompts[name],
                tuple(outcome.token_ids),
                speculation.accepted_at if speculation else (),
                {root: nodes for other, root, nodes in drafts if other == name and root < num_tokens - 1},
                timings.num_cached_tokens,
                timings.kv_bytes,
            )
        )
        burst.turns.append(talk.turns[-1])
    return burst


# ---- comparing them ---------------------------------------------------------------------------------------------


class Left:
    """The expected content of a service's cache: token sequences, each with the number of its first tokens whose KV is
    cached.
    """

    def __init__(self, *, lookahead: int, caches: bool) -> None:
        self._lookahead = lookahead
        self._caches = caches
        self._left: list[tuple[Tokens, int]] = []

    def add(self, token_ids: Tokens, num_tokens: int) -> None:
        self._left.append((token_ids, min(num_tokens, len(token_ids) - self._lookahead)))

    def num_found(self, prompt: Tokens) -> int:
        """Returns how many tokens of `prompt` have their KV in the cache. The last token never counts: it must be
        computed.
        """

        def num_usable(token_ids: Tokens, num_tokens: int) -> int:
            num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, token_ids, strict=False)))
            return min(num_same - self._lookahead, num_tokens, len(prompt) - 1)

        return max((num_usable(*left) for left in self._left), default=0) if self._caches else 0


def check_counts(pair: InProcessPair, bursts: Sequence[Burst], options: PairOptions) -> None:
    """Checks that each service was sent, and computed, exactly the KV that it cannot have had.

    If requests of a burst begin alike, the first one brings the common KV and the others wait for it. So what each one
    finds does not depend on time.
    """
    groups = pair.decode.pool.groups
    lookahead = groups["draft"].num_layers if "draft" in groups else 0
    token_bytes = sum(group.token_bytes for group in groups.values())
    decode = Left(lookahead=lookahead, caches=options.decode_caches)
    prefill = Left(lookahead=lookahead, caches=options.prefill_caches)
    for burst in bursts:
        handed_over = {row.request_id: row for row in burst.rows}
        assert len(handed_over) == len(burst.rows), "a row was handed over twice"
        num_local = bytes_missing = num_uncached = 0
        for place, turn in enumerate(burst.turns):
            num_held, num_tokens = decode.num_found(turn.prompt), len(turn.prompt)
            if not place:
                decode.add(turn.prompt, num_tokens)
            if turn.name not in handed_over:
                num_local += num_tokens - num_held
                assert (turn.num_cached, turn.kv_bytes) == (num_held, 0), "decode found other KV than was there"
                continue
            held = dict(handed_over[turn.name].num_held_tokens)
            assert held == dict.fromkeys(groups, num_held), "decode holds other KV than was there"
            assert turn.kv_bytes == (num_tokens - num_held) * token_bytes, "decode received other KV than it lacked"
            bytes_missing += turn.kv_bytes
        turns = {turn.name: turn for turn in burst.turns}
        for place, row in enumerate(burst.rows):
            num_found = prefill.num_found(row.token_ids)
            assert turns[row.request_id].num_cached == num_found, "prefill found other KV than was there"
            num_uncached += len(row.token_ids) - num_found
            if not place:
                prefill.add(row.token_ids, len(row.token_ids))
        assert burst.bytes_sent == bytes_missing, "other KV was sent than was asked for"
        assert sum(burst.local_chunks) == num_local, "decode computed other tokens than it lacked"
        assert burst.num_prefilled == num_uncached, "prefill computed other tokens than it lacked"
        for turn in burst.turns:
            decode.add(turn.prompt, len(turn.prompt))
            if lookahead <= 1:  # a head of several layers wrote its KV of the output from rejected drafts too
                decode.add((*turn.prompt, *turn.token_ids), len(turn.prompt) + len(turn.token_ids) - 1)
        for row in burst.rows:
            prefill.add(row.token_ids, len(row.token_ids))


MakeForOptions = Callable[[PairOptions], InProcessPair]


def hold_cold(make: MakeForOptions, options: PairOptions, every: Sequence[Talk], *, at_once: bool) -> list[Talk]:
    """Holds conversations without cached KV: a prefill service computes every prompt anew. Returns the conversations
    with their turns.
    """
    cold = [replace(talk, turns=[]) for talk in every]
    options = replace(options, local_prefill_tokens=0, prefill_fallback=False)
    pair = make(options)
    bursts = hold(pair, cold, salt=lambda _name: None, at_once=at_once)
    check_counts(pair, bursts, replace(options, prefill_caches=False, decode_caches=False))
    return cold


def compare(make: MakeForOptions, options: PairOptions, cold: Sequence[Talk], *, at_once: bool) -> list[Burst]:
    """Holds the conversations again with cached KV (warm), compares them with those held without it (`cold`), and
    checks the counts. Returns the warm bursts.
    """
    warm = [replace(talk, turns=[]) for talk in cold]
    pair = make(options)
    bursts = hold(pair, warm, salt=lambda _name: "", at_once=at_once)
    for before, after in zip(cold, warm, strict=True):
        assert after.answers == before.answers, "tokens differ"
        assert [turn.drafts for turn in after.turns] == [turn.drafts for turn in before.turns], "drafts differ"
        accepted = [turn.accepted_at for turn in after.turns]
        assert accepted == [turn.accepted_at for turn in before.turns], "acceptance differs"
    check_counts(pair, bursts, options)
    computes_here = bool(options.local_prefill_tokens) or options.prefill_fallback
    assert any(burst.local_chunks for burst in bursts) == computes_here
    return bursts
