"""The interface of a matcher, which follows one output through its grammar, and the masks of a step's draws."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.errors import InvalidRequest
from common.grammar.grammar import Grammar

Mask = NDArray[np.int32]
"""One bit for each token of the vocabulary: bit t % 32 of word t // 32. 1 means that the grammar allows the token."""

ALL_ALLOWED = -1
"""A word of a mask that forbids nothing."""

_BITS = 32


class Matcher(Protocol):
    """Where one output is in its grammar. It belongs to one thread at a time."""

    def accept(self, token_id: int) -> bool:
        """Goes on by one token. Returns False, and stays where it is, if the grammar forbids the token here."""

    def go_back(self, num_tokens: int) -> None:
        """Takes back the last tokens that were accepted."""

    def fill(self, mask: Mask) -> None:
        """Writes which tokens may come next. If the output may end here, its end tokens are among them."""


NewMatcher = Callable[[Grammar, Sequence[int]], Awaitable[Matcher]]
"""Makes a matcher for a grammar that has accepted these tokens of output. Raises InvalidRequest, naming the field."""


async def no_grammars(grammar: Grammar, output_ids: Sequence[int]) -> Matcher:
    """The NewMatcher of a service that has no tokenizer."""
    raise InvalidRequest(f"sampling.{grammar.kind.value}", "is not served here")


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // _BITS)


@dataclass(frozen=True, slots=True)
class Least:
    """The least length of an output: for so many tokens more none of `end_ids` may come, unless nothing else may."""

    num_tokens: int
    end_ids: tuple[int, ...]

    def forbid_end(self, mask: Mask, num_drafts: int) -> None:
        """Takes the end tokens out of the mask of a draw after `num_drafts` drafts, if it would come too early."""
        if num_drafts >= self.num_tokens:
            return
        others = mask.copy()
        bits = others.view(np.uint8)
        for token_id in self.end_ids:
            bits[token_id // 8] &= 0xFF ^ (1 << token_id % 8)  # the words are little-endian
        if others.any():
            mask[:] = others


def fill_nodes(
    matcher: Matcher, masks: Mask, least: Least, token_ids: Sequence[int] = (), parents: Sequence[int] = ()
) -> None:
    """Fills the masks of the draws after each node of a tree of drafts, and leaves the matcher where it was.

    Node 0 is the output so far. Drafts `token_ids` are nodes 1, 2, ...; the parent of each comes before it. `masks` is
    [nodes, words]. After a draft that the grammar forbids nothing is drawn that counts, so its mask, and those of its
    descendants, stay as they are.
    """

    def fill(node: int) -> None:
        matcher.fill(masks[node])
        least.forbid_end(masks[node], len(path) - 1)

    path = [0]  # the nodes that the matcher has accepted
    fill(0)
    children: dict[int, list[int]] = {}
    for draft, parent in enumerate(parents, start=1):
        children.setdefault(parent, []).append(draft)
    waiting = [(0, child) for child in reversed(children.get(0, ()))]
    while waiting:
        parent, node = waiting.pop()
        while path[-1] != parent:
            path.pop()
            matcher.go_back(1)
        if matcher.accept(token_ids[node - 1]):
            path.append(node)
            fill(node)
            waiting += [(node, child) for child in reversed(children.get(node, ()))]
    if len(path) > 1:
        matcher.go_back(len(path) - 1)
