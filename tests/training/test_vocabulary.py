"""Tests of the choice of the draft vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import ConfigError
from training.vocabulary import UNKNOWN, most_frequent

_ANSWERS = np.array([7, 7, 7, 2, 2, 9, 4])


def test_it_is_the_most_frequent_tokens_with_their_offsets_and_draft_ids() -> None:
    vocabulary = most_frequent(_ANSWERS, draft_vocab=3, vocab_size=10)
    assert vocabulary.token_ids.tolist() == [2, 4, 7]
    tensors = vocabulary.tensors()
    assert tensors["d2t"].tolist() == [2 - 0, 4 - 1, 7 - 2]
    assert tensors["t2d"].nonzero().flatten().tolist() == [2, 4, 7]
    assert vocabulary.draft_ids().tolist() == [{2: 0, 4: 1, 7: 2}.get(token_id, UNKNOWN) for token_id in range(10)]


def test_many_ties_go_to_the_lower_ids() -> None:
    answers = np.random.default_rng(0).integers(0, 2000, 4000)
    counts = np.bincount(answers, minlength=2000).tolist()
    best = sorted(range(2000), key=lambda token: (-counts[token], token))[:700]
    assert most_frequent(answers, draft_vocab=700, vocab_size=2000).token_ids.tolist() == sorted(best)


def test_it_cannot_exceed_the_target_s() -> None:
    with pytest.raises(ConfigError, match="draft_vocab: 11 exceeds the target's vocabulary of 10"):
        most_frequent(_ANSWERS, draft_vocab=11, vocab_size=10)
