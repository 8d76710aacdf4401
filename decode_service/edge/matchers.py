"""Makes the matchers of constrained requests, from their grammar and from their rules about tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from common.errors import InvalidRequest
from common.grammar.matcher import Matcher, NewMatcher, TokenRulesMatcher, allows, num_words
from common.rpc.fair_shares import Caller
from common.sampling.params import ResolvedSampling


class Matchers(Protocol):
    async def of(self, sampling: ResolvedSampling, output_ids: Sequence[int], *, client: str, tenant: str) -> Matcher:
        """Returns the matcher of a constrained request. It has accepted the output tokens `output_ids`; if the last of
        them ends the output, it has accepted all but that one, which it allows.

        Requests of different clients take turns, and so do those of one client's tenants. Raises InvalidRequest, naming
        the field, or Overloaded.
        """


class Replay(Protocol):
    def __call__(self, work: Callable[[], Matcher], *, num_tokens: int, caller: Caller) -> Awaitable[Matcher]:
        """Runs `work`, which goes through `num_tokens` tokens, on a thread. Raises Overloaded if too much waits."""


class MatchersHere(Matchers):
    """Makes matchers in this process. `new_matcher` makes those of grammars and reasoning limits."""

    def __init__(self, *, new_matcher: NewMatcher, replay: Replay, vocab_size: int) -> None:
        self._new_matcher = new_matcher
        self._replay = replay
        self._vocab_size = vocab_size

    async def of(self, sampling: ResolvedSampling, output_ids: Sequence[int], *, client: str, tenant: str) -> Matcher:
        end = len(output_ids) - 1
        has_ended = end >= sampling.min_tokens and output_ids[end] in sampling.eos_token_ids
        if has_ended:
            *output_ids, end_id = output_ids
        matcher = None
        if sampling.constrains_text:
            matcher = await self._new_matcher(
                sampling.grammar, output_ids, sampling.reasoning, client=client, tenant=tenant
            )
        if (rules := sampling.token_rules) is not None:
            apply = partial(TokenRulesMatcher, matcher, rules, output_ids, vocab_size=self._vocab_size)
            matcher = await self._replay(apply, num_tokens=len(output_ids), caller=(client, tenant))
        assert matcher is not None, "the request is not constrained"
        if has_ended:
            mask = np.zeros(num_words(self._vocab_size), np.int32)
            matcher.fill(mask)
            if not allows(mask, end_id):
                raise InvalidRequest(
                    "generated_token_ids", f"the grammar forbids the end, token {end_id}, at index {end}"
                )
        return matcher
