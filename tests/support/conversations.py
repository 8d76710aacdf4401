"""Conversations with a pair, held cold and warm and compared: tokens, drafts, what was cached and what was sent."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from common.sampling.params import ResolvedSampling
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


@dataclass
class Turn:
    """One finished request of a conversation: prompt, output, and counts of drafts, cached tokens and bytes."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    accepted_at: tuple[int, ...]
    num_cached: int
    kv_bytes: int


@dataclass
class Talk:
    """A conversation: each prompt is everything said before it and `says` more."""

    sampling: ResolvedSampling
    says: list[tuple[int, ...]]
    turns: list[Turn] = field(default_factory=list)

    @property
    def next_prompt(self) -> tuple[int, ...]:
        said = (*self.turns[-1].prompt, *self.turns[-1].token_ids) if self.turns else ()
        return (*said, *self.says[len(self.turns)])


def talks(number: int, vocab_size: int, *, temperature: float = 0.0) -> list[Talk]:
    """Conversations that all begin with the same NUM_SHARED tokens."""
    draw = random.Random(11)

    def says(size: int) -> tuple[int, ...]:
        return tuple(draw.randrange(2, vocab_size) for _ in range(size))

    system = says(NUM_SHARED)
    return [
        Talk(
            ResolvedSampling(seed=seed, max_tokens=NEW_TOKENS, temperature=temperature),
            [(*system, *says(5 + seed % 4)), *(says(3 + (seed + turn) % 5) for turn in range(NUM_TURNS - 1))],
        )
        for seed in range(number)
    ]


def hold(pair: InProcessPair, every: Sequence[Talk], *, salt: Callable[[str], str | None], at_once: bool) -> None:
    """Run all turns of the conversations, one request at a time or one of each conversation at once. `salt` gives the
    cache salt of each request's name.
    """
    for turn in range(NUM_TURNS):
        for group in [every] if at_once else [[talk] for talk in every]:
            asked = {f"{id(talk)}-{turn}": talk for talk in group}
            prompts = {name: talk.next_prompt for name, talk in asked.items()}
            for name, talk in asked.items():
                pair.submit(name, prompts[name], talk.sampling, cache_salt=salt(name))
            pair.run()
            for name, talk in asked.items():
                outcome = pair.outcomes[name]
                assert outcome.finished is not None, outcome.error
                speculation, timings = outcome.finished.speculation, outcome.finished.timings
                talk.turns.append(
                    Turn(
                        prompts[name],
                        tuple(outcome.token_ids),
                        speculation.accepted_at if speculation else (),
                        timings.num_cached_tokens,
                        timings.kv_bytes,
                    )
                )
    pair.settle()


MakeForOptions = Callable[[PairOptions], InProcessPair]


def compare(make: MakeForOptions, options: PairOptions, every: list[Talk], *, at_once: bool) -> list[Turn]:
    """Hold the conversations cold and warm, and compare them. Returns the turns of the warm ones."""
    cold, warm = ([replace(talk, turns=[]) for talk in every] for _ in range(2))
    hold(make(replace(options, local_prefill_tokens=0)), cold, salt=lambda _name: None, at_once=at_once)
    pair = make(options)
    hold(pair, warm, salt=lambda _name: "", at_once=at_once)
    token_bytes = sum(group.token_bytes for group in pair.decode.pool.groups.values())
    lookahead = pair.decode.pool.groups["draft"].num_layers if "draft" in pair.decode.pool.groups else 0
    for before, after in zip(cold, warm, strict=True):
        assert [turn.token_ids for turn in after.turns] == [turn.token_ids for turn in before.turns]
        assert [turn.accepted_at for turn in after.turns] == [turn.accepted_at for turn in before.turns]
        for turn in before.turns:
            assert (turn.num_cached, turn.kv_bytes) == (0, len(turn.prompt) * token_bytes)
        for earlier, turn in itertools.pairwise(after.turns):
            num_common = len(earlier.prompt)
            if options.prefill_caches and not options.local_prefill_tokens:
                assert turn.num_cached >= num_common - lookahead, "prefill computed what it had"
            if options.decode_caches:
                num_common += NEW_TOKENS - 1 if lookahead <= 1 else 0
                num_held = len(turn.prompt) - turn.kv_bytes // token_bytes
                assert num_held >= num_common - max(lookahead, 1), "what decode had was sent"
    if not at_once and options.prefill_caches:
        assert all(talk.turns[0].num_cached >= NUM_SHARED - lookahead for talk in warm[1:])
    turns = [turn for talk in warm for turn in talk.turns]
    assert any(not turn.kv_bytes for turn in turns) == bool(options.local_prefill_tokens)
    return turns
