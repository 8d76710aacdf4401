"""The interface of a matcher, which follows one output through its grammar, and masks of the tokens allowed next.

`TokenRulesMatcher` enforces a request's rules about single tokens and sequences of tokens.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import InvalidRequest
from common.grammar.grammar import Grammar, TokenRules
from common.grammar.reasoning import Reasoning

Mask = NDArray[np.int32]
"""One bit for each token of the vocabulary: bit t % 32 of word t // 32. 1 means that the token is allowed."""

ALL_ALLOWED = -1
"""One word of a mask, with all its tokens allowed."""

NOT_FORCED = -1
"""Marks places without a forced token in a tensor of forced tokens."""

_BITS = 32


class Matcher(Protocol):
    """Follows one output and says which tokens may come next. Only one thread may use it at a time.

    `failure` says why the matcher cannot go on, for example that the grammar reached a limit. It is "" as long as it
    can.
    """

    @property
    def failure(self) -> str: ...

    def copy(self) -> Matcher:
        """Returns an independent matcher at the same point of the output."""

    def accept(self, token_id: int) -> bool:
        """Advances by one token of the output. Returns False, and does not advance, if the token is forbidden here."""

    def fill(self, mask: Mask) -> None:
        """Writes into `mask` which tokens may come next: none if the matcher has failed. If the output may end here,
        its end tokens are among them.
        """

    def forced(self) -> Sequence[int]:
        """Returns tokens with which the output is bound to go on, as many as are easily known: none if several may come
        next. Only masks are binding: the same text may be spelled by other tokens.
        """


class NewMatcher(Protocol):
    """Makes the matcher of a request, which has accepted the output tokens `output_ids` already.

    `reasoning` describes the section that comes before the text that must fit `grammar`; one of the two may be None.
    Clients take turns, and so do the tenants of one client. Raises InvalidRequest, naming the field, or Overloaded.
    """

    def __call__(
        self,
        grammar: Grammar | None,
        output_ids: Sequence[int],
        reasoning: Reasoning | None,
        *,
        client: str = "",
        tenant: str = "",
    ) -> Awaitable[Matcher]: ...


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // _BITS)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """Returns a mask that allows these tokens only."""
    bits = np.zeros(num_words(vocab_size) * _BITS, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allows(mask: Mask, token_id: int) -> bool:
    return bool(mask.view(np.uint8)[token_id // 8] >> token_id % 8 & 1)


def allow(mask: Mask, token_id: int) -> None:
    mask.view(np.uint8)[token_id // 8] |= 1 << token_id % 8  # the words are little-endian


def forbid(mask: Mask, token_ids: Iterable[int]) -> None:
    """Removes these tokens from the mask of allowed tokens."""
    bits = mask.view(np.uint8)
    for token_id in token_ids:
        bits[token_id // 8] &= 0xFF ^ (1 << token_id % 8)


@dataclass(frozen=True, slots=True)
class MinLength:
    """The minimum length of an output: its next `num_tokens` tokens must not be end tokens (`end_ids`), unless the
    grammar allows nothing else.
    """

    num_tokens: int
    end_ids: tuple[int, ...]

    def forbid_end(self, mask: Mask, num_drafts: int) -> None:
        """Removes the end tokens from the mask of the draw after `num_drafts` drafts, if an end there is too early."""
        if num_drafts >= self.num_tokens:
            return
        others = mask.copy()
        forbid(others, self.end_ids)
        if others.any():
            mask[:] = others


def fill_nodes(
    matcher: Matcher, masks: Mask, least: MinLength, token_ids: Sequence[int] = (), parents: Sequence[int] = ()
) -> dict[int, str]:
    """Fills the mask of the draw after each node of a draft tree. `matcher` itself does not advance.

    Node 0 is the output so far. The drafts `token_ids` are nodes 1, 2, ...; the parent of each comes before it. `masks`
    is [nodes, words]. If the grammar forbids a draft, no draw after it counts, so the masks of its node and of the
    nodes below it are left unchanged. Copies of the matcher follow the drafts: if a draft takes a copy to a limit of
    the grammar, only that copy fails. Its node's mask allows nothing. Returns the failures of copies by node.
    """
    failures: dict[int, str] = {}
    matcher.fill(masks[0])
    least.forbid_end(masks[0], 0)
    followers, depths = {0: matcher}, {0: 0}
    num_children = Counter(parents)
    for node, (token_id, parent) in enumerate(zip(token_ids, parents, strict=True), start=1):
        if (follower := followers.get(parent)) is None:
            continue
        if not parent or num_children[parent] > 1:
            follower = follower.copy()
        if follower.accept(token_id):
            followers[node], depths[node] = follower, depths[parent] + 1
            follower.fill(masks[node])
            least.forbid_end(masks[node], depths[node])
        if follower.failure:
            masks[node] = 0
            failures[node] = follower.failure
            followers.pop(node, None)
    return failures


class TokenRulesMatcher:
    """A Matcher that allows a token if both the rules and the matcher `text` allow it.

    `text` follows a grammar or a limit on reasoning; None if the request has neither.
    """

    def __init__(
        self, text: Matcher | None, rules: TokenRules, output_ids: Sequence[int] = (), *, vocab_size: int
    ) -> None:
        """Makes a matcher that continues after `output_ids`, which `text` has accepted already.

        Raises InvalidRequest if the output breaks the rules.
        """
        # Tokens that are allowed wherever they come: forbidden sequences of one token are taken out.
        self._always = mask_of(rules.allowed_ids or range(vocab_size), vocab_size)
        forbid(self._always, (sequence[0] for sequence in rules.forbidden if len(sequence) == 1))
        self._after = _by_beginning(rules.forbidden)
        self._lens = sorted(set(map(len, self._after)))
        self._longest = max(self._lens, default=0)
        self._tail: tuple[int, ...] = ()  # the last tokens of the output, as many as a forbidden sequence begins with
        self._text = text
        self._allows_none = False
        for place, token_id in enumerate(output_ids):
            if not self._allows(token_id):
                raise InvalidRequest("generated_token_ids", f"token {token_id} at index {place} is not allowed")
            self._follow(token_id)

    @property
    def failure(self) -> str:
        if self._text is not None and self._text.failure:
            return self._text.failure
        return "no token that might come next is allowed" if self._allows_none else ""

    def copy(self) -> TokenRulesMatcher:
        other = copy.copy(self)
        other._text = None if self._text is None else self._text.copy()
        return other

    def accept(self, token_id: int) -> bool:
        if not self._allows(token_id) or not (self._text is None or self._text.accept(token_id)):
            return False
        self._follow(token_id)
        return True

    def fill(self, mask: Mask) -> None:
        if self._text is None:
            mask[:] = self._always
        else:
            self._text.fill(mask)
            mask &= self._always
        forbid(mask, chain.from_iterable(self._forbidden_now()))
        self._allows_none = not mask.any()

    def forced(self) -> Sequence[int]:
        return () if self._text is None else self._text.forced()

    def _follow(self, token_id: int) -> None:
        if self._longest:
            self._tail = (*self._tail, token_id)[-self._longest :]

    def _allows(self, token_id: int) -> bool:
        return allows(self._always, token_id) and not any(token_id in ids for ids in self._forbidden_now())

    def _forbidden_now(self) -> Iterator[Set[int]]:
        """Yields sets of tokens: those that would now complete a forbidden sequence of several tokens."""
        for length in self._lens:
            if found := self._after.get(self._tail[-length:]):
                yield found


def _by_beginning(sequences: Iterable[tuple[int, ...]]) -> Mapping[tuple[int, ...], Set[int]]:
    """Maps the tokens before the last one of each sequence to all possible last tokens. Sequences of a single token are
    left out.
    """
    found: dict[tuple[int, ...], set[int]] = {}
    for *beginning, last in sequences:
        if beginning:
            found.setdefault(tuple(beginning), set()).add(last)
    return found
