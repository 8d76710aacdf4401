"""The draft vocabulary: the target's most frequent answer tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError
from training.data import Ints

UNKNOWN = -1
"""The draft id of a target id outside the draft vocabulary."""


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """`token_ids` [Vd] int64, ascending: the target id of each draft id."""

    token_ids: Ints
    vocab_size: int

    def draft_ids(self) -> Ints:
        """[V]: the draft id of each target id, or UNKNOWN."""
        ids = np.full(self.vocab_size, UNKNOWN, dtype=np.int64)
        ids[self.token_ids] = np.arange(self.token_ids.size)
        return ids

    def tensors(self) -> dict[str, Tensor]:
        """`d2t` [Vd] int64, target id = draft id + d2t[draft id], and `t2d` [V] bool, which marks the ids known."""
        known = torch.zeros(self.vocab_size, dtype=torch.bool)
        known[torch.from_numpy(self.token_ids)] = True
        return {"d2t": torch.from_numpy(self.token_ids - np.arange(self.token_ids.size)), "t2d": known}


def most_frequent(answer_tokens: Ints, *, draft_vocab: int, vocab_size: int) -> DraftVocabulary:
    """Ties go to the lower ids. Raises ConfigError."""
    if draft_vocab > vocab_size:
        raise ConfigError(f"draft_vocab: {draft_vocab} exceeds the target's vocabulary of {vocab_size}")
    counts = np.bincount(answer_tokens, minlength=vocab_size)
    return DraftVocabulary(np.sort(np.argsort(-counts, kind="stable")[:draft_vocab]), vocab_size)
