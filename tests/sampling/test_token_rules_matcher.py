"""Tests that the work for token rules does not grow with the number of sequences that they forbid."""

from __future__ import annotations

import numpy as np

from common.grammar.grammar import TokenRules
from common.grammar.matcher import TokenRulesMatcher, allows, num_words

VOCAB_SIZE, NUM_SEQUENCES = 1000, 300
LAST_BUT_ONE = 999


class CountedId(int):
    """A token id. `num_compared` counts how often any such id was compared with another number."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        CountedId.num_compared += 1
        return int(self) == other

    def __hash__(self) -> int:
        return hash(int(self))


def test_only_the_sequences_that_the_output_ends_in_are_looked_at() -> None:
    forbidden = tuple((first, LAST_BUT_ONE, 2 * first) for first in range(1, NUM_SEQUENCES))
    output = [CountedId(token_id) for token_id in (7, LAST_BUT_ONE, 9, LAST_BUT_ONE)]
    matcher = TokenRulesMatcher(None, TokenRules(forbidden=forbidden), output[:-1], vocab_size=VOCAB_SIZE)
    CountedId.num_compared = 0
    assert matcher.accept(output[-1])
    mask = np.zeros(num_words(VOCAB_SIZE), np.int32)
    matcher.fill(mask)
    assert not allows(mask, 18)
    assert allows(mask, 14) and allows(mask, 20)
    assert not matcher.accept(CountedId(18))
    assert CountedId.num_compared < 20
