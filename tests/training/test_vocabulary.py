"""Tests of the choice of the draft vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import ConfigError
from training.vocabulary import UNKNOWN, most_frequent

_ANSWERS = np.array([7, 7, 7, 2, 2, 9, 4])


def test_it_is_the_most_frequent_tokens_in_ascending_order_ties_to_the_lower_id() -> None:
    assert most_frequent(_ANSWERS, draft_vocab=3, vocab_size=10).token_ids.tolist() == [2, 4, 7]


def test_many_ties_go_to_the_lower_ids() -> None:
    answers = np.random.default_rng(0).integers(0, 2000, 4000)
    counts = np.bincount(answers, minlength=2000).tolist()
    best = sorted(range(2000), key=lambda token: (-counts[token], token))[:700]
    assert most_frequent(answers, draft_vocab=700, vocab_size=2000).token_ids.tolist() == sorted(best)


def test_d2t_holds_offsets_and_t2d_marks_the_same_tokens() -> None:
    tensors = most_frequent(_ANSWERS, draft_vocab=3, vocab_size=10).tensors()
    assert tensors["d2t"].tolist() == [2 - 0, 4 - 1, 7 - 2]
    assert tensors["t2d"].nonzero().flatten().tolist() == [2, 4, 7]


def test_tokens_outside_have_no_draft_id() -> None:
    draft_ids = most_frequent(_ANSWERS, draft_vocab=3, vocab_size=10).draft_ids()
    assert draft_ids.tolist() == [UNKNOWN, UNKNOWN, 0, UNKNOWN, 1, UNKNOWN, UNKNOWN, 2, UNKNOWN, UNKNOWN]


def test_it_cannot_exceed_the_target_s() -> None:
    with pytest.raises(ConfigError, match="draft_vocab: 11 exceeds the target's vocabulary of 10"):
        most_frequent(_ANSWERS, draft_vocab=11, vocab_size=10)
