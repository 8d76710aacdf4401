"""Reads the reduced vocabulary of a draft head: the target tokens that it can propose."""

from __future__ import annotations

import torch
from torch import Tensor

from common.draft.checkpoint import Checkpoint


def read_token_ids(checkpoint: Checkpoint, *, vocab_size: int, draft_vocab_size: int, device: torch.device) -> Tensor:
    """Returns the target's token id of each draft id: [draft_vocab_size] int64, ascending.

    The checkpoint's tensor `d2t` holds offsets: target id = draft id + d2t[draft id]. It may be absent if the
    vocabulary is not reduced. The tensor `t2d` marks the target ids that have a draft id. It may be absent too, but
    must agree with `d2t`. Raises DraftMismatch if a tensor is missing or invalid, or if they disagree.
    """
    if draft_vocab_size > vocab_size:
        raise checkpoint.mismatch(f"draft_vocab_size {draft_vocab_size} exceeds vocab_size {vocab_size}")
    token_ids = torch.arange(draft_vocab_size, device=device)
    if draft_vocab_size < vocab_size or "d2t" in checkpoint:
        token_ids = token_ids + checkpoint.take_integers("d2t", draft_vocab_size)
        if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab_size:
            raise checkpoint.mismatch(f"d2t leads outside the target's {vocab_size} ids")
        if not bool((token_ids[1:] > token_ids[:-1]).all()):
            raise checkpoint.mismatch("d2t: the target ids i + d2t[i] are not strictly ascending")
    if "t2d" in checkpoint:
        expected = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        expected[token_ids] = 1
        if not torch.equal(checkpoint.take_integers("t2d", vocab_size), expected):
            raise checkpoint.mismatch("t2d marks other target ids than d2t leads to")
    return token_ids
