"""The draft vocabulary: the most frequent tokens in the target's answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.errors import ConfigError
from training.data import Ints

UNKNOWN = -1
"""The draft id of a token that is not in the draft vocabulary."""


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """A subset of the target's vocabulary. `token_ids` [Vd] int64 has the target's id for each draft id, ascending."""

    token_ids: Ints
    vocab_size: int

    def draft_ids(self) -> Ints:
        """Returns the draft id of each of the target's V tokens, [V], or UNKNOWN."""
        ids = np.full(self.vocab_size, UNKNOWN, dtype=np.int64)
        ids[self.token_ids] = np.arange(self.token_ids.size)
        return ids

    def tensors(self) -> dict[str, Tensor]:
        """Returns the two tensors of the EAGLE-3 format.

        `d2t` [Vd] int64: the target's id is the draft id + d2t[draft id]. `t2d` [V] bool is True for tokens in the
        draft vocabulary.
        """
        known = torch.zeros(self.vocab_size, dtype=torch.bool)
        known[torch.from_numpy(self.token_ids)] = True
        return {"d2t": torch.from_numpy(self.token_ids - np.arange(self.token_ids.size)), "t2d": known}


def most_frequent(answer_tokens: Ints, *, draft_vocab: int, vocab_size: int) -> DraftVocabulary:
    """Returns the draft vocabulary of the most frequent tokens. In a tie the lower id is chosen.

    Raises ConfigError if `draft_vocab` exceeds `vocab_size`.
    """
    if draft_vocab > vocab_size:
        raise ConfigError(f"draft_vocab: {draft_vocab} exceeds the target's vocabulary of {vocab_size}")
    counts = np.bincount(answer_tokens, minlength=vocab_size)
    return DraftVocabulary(np.sort(np.argsort(-counts, kind="stable")[:draft_vocab]), vocab_size)
