"""Tests that the columns indexed by pool row, which handle all requests of a step at once, give each request the same
result as taking its tokens one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.pool import KvPool
from common.sampling.params import ResolvedSampling
from common.telemetry.stats import SpeculationStats
from decode_service.messages import Submit
from decode_service.schedule.request import Request
from decode_service.schedule.running_rows import RunningRows
from decode_service.speculate.spec_info import SpecInfo
from tests.engine.relay_rig import make_pool

WIDTH = 3
EOS, STOP = 7, 8
STATS = SpeculationStats(num_levels=2, accept_lens=(), draft_s=0.25, verify_s=0.5, extend_s=0.125)
offers = st.lists(st.tuples(st.lists(st.integers(5, 9), min_size=WIDTH, max_size=WIDTH), st.integers(1, WIDTH)))


@dataclass(frozen=True, slots=True)
class Offered:
    """One request's limit, whether a token may end it, and the tokens that each step offers it."""

    max_tokens: int
    can_stop: bool
    steps: list[tuple[list[int], int]]


def new_request(pool: KvPool, number: int, offered: Offered) -> Request:
    ends = {"eos_token_ids": (EOS,), "stop_token_ids": (STOP,)} if offered.can_stop else {}
    sampling = ResolvedSampling(seed=0, max_tokens=offered.max_tokens, **ends)
    req = Request.of(Submit(str(number), (1, 2), 2, sampling), arrival=number, now_s=0.0)
    req.lease = pool.reserve(2)
    return req


def one_by_one(offered: Offered) -> list[int]:
    output: list[int] = []
    for token_ids, num_offered in offered.steps:
        for token_id in token_ids[:num_offered]:
            output.append(token_id)
            if len(output) == offered.max_tokens or (offered.can_stop and token_id in (EOS, STOP)):
                return output
    return output


@settings(max_examples=60, database=None, derandomize=True, deadline=None)
@given(st.lists(st.builds(Offered, st.integers(1, 6), st.booleans(), offers), min_size=1, max_size=4))
def test_tokens_are_taken_until_one_ends_the_output(requests: list[Offered]) -> None:
    pool, rows = make_pool(), RunningRows(max_rows=4, max_context_tokens=16, max_depth=2)
    reqs = [new_request(pool, number, offered) for number, offered in enumerate(requests)]
    for req in reqs:
        rows.enter(req)
    live = list(range(len(reqs)))
    for step in range(max(len(offered.steps) for offered in requests)):
        live = [i for i in live if step < len(requests[i].steps)]
        offered = [requests[i].steps[step] for i in live]
        where = np.array([reqs[i].lease.row for i in live], dtype=np.int64)  # type: ignore[union-attr]
        tokens = np.array([token_ids for token_ids, _ in offered], dtype=np.int64).reshape(-1, WIDTH)
        _, have_ended = rows.append(where, tokens, np.array([num for _, num in offered], dtype=np.int64))
        assert (rows.want_launch(where) | have_ended).all(), "a request that goes on wants no launch"
        rows.num_in_flight[where] = 16
        assert not rows.want_launch(where).any(), "steps in flight will add more than is wanted"
        rows.num_in_flight[where] = 0
        live = [i for i, has_ended in zip(live, have_ended.tolist(), strict=True) if not has_ended]
    for req, offered_to in zip(reqs, requests, strict=True):
        rows.leave(req)
        assert req.token_ids[2:] == one_by_one(offered_to)


def test_what_a_request_did_is_added_up_over_its_stays() -> None:
    pool, rows = make_pool(), RunningRows(max_rows=4, max_context_tokens=16, max_depth=2)
    req = new_request(pool, 0, Offered(9, can_stop=False, steps=[]))
    assert req.lease is not None
    row = np.array([req.lease.row])
    for num_accepted, num_forced in ((2, 1), (1, 0), (0, 0), (0, 2)):
        rows.enter(req)
        accepted, forced = np.array([num_accepted]), np.array([num_forced])
        rows.drafts.add(row, SpecInfo.chain(2), num_accepted=accepted, num_forced=forced, stats=STATS)
        assert rows.decode(row).size == 1 and rows.decode(row).size == 0, "who decodes first is not told once"
        rows.leave(req)
    counts = req.speculation
    assert (counts.num_verify_steps, counts.num_drafted_tokens) == (4, 8)
    assert (counts.num_accepted_tokens, counts.num_forced_tokens) == (3, 1)
    assert (counts.drafted_at, counts.accepted_at) == ((2, 2), (1, 0)), "forced drafts count by position"
    assert (counts.draft_s, counts.verify_s, counts.extend_s) == (1.0, 2.0, 0.5)
    assert not rows.want_launch(row).any(), "a row that was left wants a launch"


def test_a_row_has_another_serial_each_time_it_is_entered() -> None:
    pool, rows = make_pool(), RunningRows(max_rows=4, max_context_tokens=16, max_depth=0)
    req = new_request(pool, 0, Offered(9, can_stop=False, steps=[]))
    assert req.lease is not None
    serials = []
    for _ in range(2):
        rows.enter(req)
        serials.append(int(rows.serials[req.lease.row]))
        rows.leave(req)
    assert 0 not in serials and len(set(serials)) == 2
    assert rows.serials[req.lease.row] == 0
