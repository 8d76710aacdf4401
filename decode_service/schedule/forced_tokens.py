"""The tokens that grammars force, which a step drafts in place of the draft head's guesses.

step N in flight  ─▶ its tokens are on the host when it publishes its lengths ─▶ matchers look ahead
                                                        ─▶ what is forced next ─▶ drafts of step N+1, at its launch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from decode_service.schedule.request import Request
from decode_service.schedule.results import AheadMatcher, StepInFlight
from decode_service.schedule.schedule_batch import ScheduleBatch


def forced_tokens(
    running: ScheduleBatch,
    num_in_flight: NDArray[np.int64],
    in_flight: StepInFlight | None,
    ahead: Mapping[Request, AheadMatcher],
    *,
    max_forced: int,
) -> dict[Request, Sequence[int]]:
    """Returns the tokens, at most `max_forced`, with which grammars force requests of the batch to go on. Requests that
    want no drafts, and those of which nothing is forced, have none.

    `num_in_flight` [rows] counts the steps in flight that run each pool row. A matcher has accepted the tokens of all
    steps before `in_flight`; those `ahead` have accepted its tokens too.
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
