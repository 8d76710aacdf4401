"""Computes what grammars give a step: forced tokens, which it drafts, and the masks of its draws.

step N in flight  ─▶ its tokens are on the host when it publishes its lengths ─▶ matchers look ahead
                           ─▶ what is forced next ─▶ drafts of step N+1, at its launch
step N has ended  ─▶ matchers accept its tokens ─▶ masks of step N+1, whose forward computes meanwhile
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from common.grammar.matcher import ALL_ALLOWED, Mask, MinLength, fill_nodes, num_words
from decode_service.schedule.request import Request
from decode_service.schedule.results import AheadMatcher
from decode_service.schedule.schedule_batch import ScheduleBatch
from decode_service.schedule.step import LaunchedStep


def forced_tokens(
    running: ScheduleBatch,
    num_in_flight: NDArray[np.int64],
    in_flight: LaunchedStep | None,
    ahead: Mapping[Request, AheadMatcher],
    *,
    max_forced: int,
) -> dict[Request, Sequence[int]]:
    """Returns, for each request of the batch, the tokens that its grammar forces next, at most `max_forced`. Requests
    that want no drafts or have no known forced tokens are left out.

    `num_in_flight` [rows] counts the steps in flight that run each pool row. Requests' matchers have accepted the
    tokens of all steps before `in_flight`. The matchers `ahead` have accepted the tokens of `in_flight` too.
    """
    found: dict[Request, Sequence[int]] = {}
    for i in running.sampling.constrained.tolist():
        req = running.reqs[i]
        if req.matcher is None or not req.wants_drafts:
            continue
        if req in ahead:
            token_ids = ahead[req].matcher.forced()
        elif not num_in_flight[running.rows[i]]:
            token_ids = req.matcher.forced()
        elif in_flight is not None and not in_flight.batch.has_drafts:
            token_ids = req.matcher.forced()[1:]  # the step in flight has the first one
        else:
            continue
        if token_ids:
            found[req] = token_ids[:max_forced]
    return found


def masks_of(step: LaunchedStep, are_held: NDArray[np.bool_], *, vocab_size: int) -> tuple[Mask, list[Request]]:
    """Returns the masks of the draws of the step's constrained entries, [C * nodes, words], as `draw` takes them, and
    the requests whose matchers have failed. Sets each request's `withheld`.

    The matchers must have accepted the tokens of all earlier steps. Masks allow everything for entries whose requests
    have left their rows (`are_held` [B] is False) or whose matchers have failed.
    """
    batch = step.batch
    entries = batch.sampling.constrained
    masks = np.full((len(entries), batch.num_tokens, num_words(vocab_size)), ALL_ALLOWED, np.int32)
    failed = []
    token_ids = parents = np.empty((batch.batch_size, 0), np.int64)
    if batch.has_drafts:
        assert step.output.masked is not None
        drafts = step.output.masked.drafts.get()
        token_ids, parents = drafts.token_ids.numpy(), drafts.parents.numpy()
    for place, entry in enumerate(entries.tolist()):
        req = step.reqs[entry]
        if req.matcher is None or not are_held[entry]:
            continue
        is_drafted = batch.has_drafts and entry not in batch.undrafted
        tree = (token_ids[entry].tolist(), parents[entry].tolist()) if is_drafted else ([], [])
        least = MinLength(req.sampling.min_tokens - req.num_output, req.sampling.end_token_ids)
        failures = fill_nodes(req.matcher, masks[place], least, *tree)
        req.withheld = {_path(node, *tree): failure for node, failure in failures.items()}
        if req.matcher.failure:
            masks[place] = ALL_ALLOWED
            failed.append(req)
    return masks.reshape(-1, masks.shape[2]), failed


def _path(node: int, token_ids: Sequence[int], parents: Sequence[int]) -> tuple[int, ...]:
    """Returns the drafts that lead to a node of a draft tree (see `fill_nodes`)."""
    path: list[int] = []
    while node:
        path.append(token_ids[node - 1])
        node = parents[node - 1]
    return tuple(reversed(path))
