"""The masks under which a step draws its tokens, for the rows whose output must fit a grammar."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.grammar.matcher import ALL_ALLOWED, Mask, MinLength, fill_nodes, num_words
from decode_service.schedule.request import Request
from decode_service.schedule.results import BegunStep


def masks_of(begun: BegunStep, are_held: NDArray[np.bool_], *, vocab_size: int) -> tuple[Mask, list[Request]]:
    """Returns the masks of the draws of the step's constrained entries, [C * nodes, words], as `draw` takes them, and
    the requests whose matchers have failed.

    The matchers must have accepted the tokens of all steps before. Rows of the step that their requests have left, of
    which `are_held` [B] is False, and those of failed matchers, get masks that allow everything.
    """
    batch = begun.batch
    entries = batch.sampling.constrained
    masks = np.full((len(entries), batch.num_tokens, num_words(vocab_size)), ALL_ALLOWED, np.int32)
    failed = []
    token_ids = parents = np.empty((batch.batch_size, 0), np.int64)
    if batch.has_drafts:
        drafts = begun.output.drafts.get()
        token_ids, parents = drafts.token_ids.numpy(), drafts.parents.numpy()
    for place, entry in enumerate(entries.tolist()):
        req = begun.reqs[entry]
        if req.matcher is None or not are_held[entry]:
            continue
        is_drafted = batch.has_drafts and entry not in batch.undrafted
        tree = (token_ids[entry].tolist(), parents[entry].tolist()) if is_drafted else ()
        least = MinLength(req.sampling.min_tokens - req.num_output, req.sampling.end_token_ids)
        fill_nodes(req.matcher, masks[place], least, *tree)
        if req.matcher.failure:
            masks[place] = ALL_ALLOWED
            failed.append(req)
    return masks.reshape(-1, masks.shape[2]), failed
