"""The interface of a matcher, which follows one output through its grammar, and the masks of a step's draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import InvalidRequest
from common.grammar.grammar import Grammar
from common.grammar.reasoning import Reasoning

Mask = NDArray[np.int32]
"""One bit for each token of the vocabulary: bit t % 32 of word t // 32. 1 means that the token is allowed."""

ALL_ALLOWED = -1
"""A word of a mask that forbids nothing."""

_BITS = 32


class Matcher(Protocol):
    """Follows one output and says which tokens may come next. It belongs to one thread at a time.

    `failure` says why it cannot go on: the grammar reached a limit. It is "" as long as it can.
    """

    @property
    def failure(self) -> str: ...

    def copy(self) -> Matcher:
        """Returns another one at the same place."""

    def accept(self, token_id: int) -> bool:
        """Goes on by one token. Returns False, and stays where it is, if the token is forbidden here."""

    def fill(self, mask: Mask) -> None:
        """Writes which tokens may come next: none if it has failed. If the output may end here, its end tokens are
        among them.
        """


class NewMatcher(Protocol):
    """Makes a matcher for a grammar that has accepted these tokens of output, with this reasoning before what must fit
    the grammar. One of both may be None. Clients take turns. Raises InvalidRequest, naming the field, or Overloaded.
    """

    def __call__(
        self, grammar: Grammar | None, output_ids: Sequence[int], reasoning: Reasoning | None, *, client: str = ""
    ) -> Awaitable[Matcher]: ...


async def no_matchers(
    grammar: Grammar | None, output_ids: Sequence[int], reasoning: Reasoning | None, *, client: str = ""
) -> Matcher:
    """Refuses everything that needs a matcher: the service has no tokenizer."""
    field = "sampling.reasoning" if grammar is None else grammar.request_field
    raise InvalidRequest(field, "is not served here")


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
    """Takes these tokens out of the mask."""
    bits = mask.view(np.uint8)
    for token_id in token_ids:
        bits[token_id // 8] &= 0xFF ^ (1 << token_id % 8)


@dataclass(frozen=True, slots=True)
class MinLength:
    """The minimum length of an output: none of `end_ids` may be among its next `num_tokens` tokens, unless the grammar
    allows nothing else.
    """

    num_tokens: int
    end_ids: tuple[int, ...]

    def forbid_end(self, mask: Mask, num_drafts: int) -> None:
        """Takes the end tokens out of the mask of a draw after `num_drafts` drafts, if it would come too early."""
        if num_drafts >= self.num_tokens:
            return
        others = mask.copy()
        forbid(others, self.end_ids)
        if others.any():
            mask[:] = others


def fill_nodes(
    matcher: Matcher, masks: Mask, least: MinLength, token_ids: Sequence[int] = (), parents: Sequence[int] = ()
) -> None:
    """Fills the masks of the draws after each node of a tree of drafts, and leaves the matcher where it is.

    Node 0 is the output so far. Drafts `token_ids` are nodes 1, 2, ...; the parent of each comes before it. `masks` is
    [nodes, words]. After a draft that the grammar forbids nothing is drawn that counts, so its mask, and those of its
    descendants, stay as they are. Copies follow the drafts, so that a limit that one of them meets fails only them.
    """
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
