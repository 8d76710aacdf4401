"""What becomes of a waiting request, as a table: the state of the service, the request, and the decision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from common.errors import ContextExceeded, FingerprintMismatch, PrefillUnavailable
from common.kv.pool import CacheKey, KvPool
from common.priority import DEFAULT_AGEING
from common.prompts.awaited_kv import AwaitedKv
from common.sampling.params import ResolvedSampling
from decode_service.messages import Phase, Replica, ReplicasChanged, Submit
from decode_service.schedule.config import DecodeConfig
from decode_service.schedule.handoff_policy import (
    ComputeHere,
    Decision,
    HandoffPolicy,
    HandOver,
    Later,
    NoReplica,
    Spared,
)
from decode_service.schedule.local_prefill import LocalPrefill
from decode_service.schedule.replica_set import ReplicaSet
from decode_service.schedule.request import LostRow, Request

NOW_S = 100.0
PROMPT_LEN = 20
STEP_S = DEFAULT_AGEING.step_s
SHORT = DecodeConfig(local_prefill_tokens=8, headroom_tokens=3)
FALLBACK = DecodeConfig(local_prefill_tokens=8, prefill_fallback=True, fallback_after_s=1.0, fallback_chunk_tokens=32)
READY = Replica("a", True, instance_id="a", max_cached_tokens=1000)
GONE = Replica("a", False, error=PrefillUnavailable("it does not answer"))
OTHER_MODEL = Replica("a", False, error=FingerprintMismatch("model", "ours", "theirs"))
SMALL = Replica("a", True, instance_id="a", max_context_tokens=PROMPT_LEN - 1)


def waiting(**state: Any) -> Request:
    """Returns a request of PROMPT_LEN tokens that waits since NOW_S, with these fields."""
    sampling = ResolvedSampling(seed=0, max_tokens=8, temperature=0.0)
    submit = Submit("a", tuple(range(PROMPT_LEN)), PROMPT_LEN, sampling, cache_salt="")
    req = Request.of(submit, arrival=0, now_s=NOW_S)
    for name, value in state.items():
        setattr(req, name, value)
    return req


def policy(
    config: DecodeConfig = SHORT,
    *replicas: Replica,
    num_cached: int = 0,
    num_free_rows: int = 4,
    num_short_left: int = 0,
    has_long: bool = False,
    num_common: int = 0,
    bringing_kv: Sequence[Any] = (),
    gone_for_s: float = 0.0,
) -> HandoffPolicy:
    """Returns the policy of a service of four rows. Its prefix cache has `num_cached` of the prompt's tokens, and what
    it computes itself is `num_short_left` tokens of short prompts, and a long one if it `has_long`.
    """
    known = ReplicaSet(now_s=NOW_S - gone_for_s, lookahead=0, routes_by_prefix=True)
    known.update(ReplicasChanged(replicas or (READY,)), NOW_S - gone_for_s, num_outstanding={})
    pool = SimpleNamespace(
        num_cached=lambda key, is_received=False: num_cached,
        num_common=lambda key, other, at_least: num_common,
        num_free_rows=num_free_rows,
        rows=SimpleNamespace(max_rows=4),
    )
    local = SimpleNamespace(num_short_left=num_short_left, has_long=has_long)
    return HandoffPolicy(
        config,
        pool=cast(KvPool, pool),
        local=cast(LocalPrefill, local),
        replicas=known,
        level=lambda req, now_s: getattr(req, "level", 0),
        bringing_kv=bringing_kv,
    )


def kind_of(decision: Decision) -> str:
    match decision:
        case HandOver():
            return "there"
        case ComputeHere():
            return "here"
        case NoReplica(is_for_all):
            return "nobody" if is_for_all else "not this one"
        case Later():
            return "later"


class _OnItsWay:
    is_over = False
    num_tokens = 12
    source = SimpleNamespace(replica="")


@pytest.mark.parametrize(
    ("decision", "state", "request_state"),
    [
        ("there", {}, {}),
        ("here", {"num_cached": 12}, {}),
        ("there", {"num_cached": 11}, {}),  # 9 tokens are left, and 8 are short
        ("there", {"num_cached": 14, "num_short_left": 3}, {}),  # a burst of short prompts
        ("here", {"num_cached": 14, "num_short_left": 2}, {}),
        ("there", {"config": DecodeConfig(), "num_cached": 19}, {}),
        ("later", {}, {"not_before_s": NOW_S + 1}),
        ("later", {}, {"awaited": _OnItsWay()}),
        ("nobody", {"replica": GONE, "num_short_left": 8}, {}),
        ("not this one", {"replica": GONE}, {}),  # a shorter one may be computed here
        ("not this one", {"replica": SMALL}, {}),
        ("not this one", {"config": FALLBACK, "replica": GONE, "gone_for_s": 0.5}, {}),
        ("here", {"config": FALLBACK, "replica": GONE, "gone_for_s": 2.0}, {}),
        ("here", {"config": FALLBACK, "replica": GONE, "gone_for_s": 2.0, "num_short_left": 30}, {}),  # the long one
        ("not this one", {"config": FALLBACK, "replica": GONE, "gone_for_s": 2.0, "num_short_left": 30,
                          "has_long": True}, {}),
    ],
)  # fmt: skip
def test_who_computes_a_prompt(decision: str, state: dict[str, Any], request_state: dict[str, Any]) -> None:
    state = {"config": SHORT, "replica": READY, **state}
    rule = policy(state.pop("config"), state.pop("replica"), **state)
    req = waiting(**request_state)
    names = [each.name for each in fields(req) if not each.name.startswith("_")]
    before = [getattr(req, name) for name in names]
    assert kind_of(rule.decide(req, Spared(), NOW_S)) == decision
    assert [getattr(req, name) for name in names] == before, "a question changed the request"
    assert kind_of(rule.decide(req, Spared(), NOW_S)) == decision, "a question changed the answer to the next"


def test_a_long_turn_stays_where_its_conversation_is() -> None:
    """Its beginning is cached here and nowhere else: every replica would compute four times as much."""
    for num_cached, decision in ((15, "here"), (14, "there")):
        rule = policy(DecodeConfig(local_prefill_tokens=1), num_cached=num_cached)
        assert kind_of(rule.decide(waiting(), Spared(), NOW_S)) == decision


def test_what_is_needed_leaves_room_for_those_who_wait() -> None:
    spared = Spared().and_row(10).and_row(5)
    decided = policy(num_free_rows=3).decide(waiting(), spared, NOW_S)
    assert isinstance(decided, HandOver)
    assert (decided.need.num_tokens, decided.need.num_spared_rows) == (PROMPT_LEN, 2)
    assert decided.need.num_spared == 15 + (1 + 2 + 1) * SHORT.headroom_tokens, "each row in use keeps some slots free"
    alone = policy().decide(waiting(), Spared(), NOW_S)
    assert isinstance(alone, HandOver) and alone.need.num_spared == 0
    awaiting = policy().decide(waiting(awaited=_OnItsWay()), Spared(), NOW_S)
    assert isinstance(awaiting, Later) and awaiting.num_tokens == PROMPT_LEN - _OnItsWay.num_tokens
    assert cast(AwaitedKv[Any], awaiting.awaited).num_tokens == 12


def test_a_request_waits_for_kv_that_another_one_brings() -> None:
    """Another prompt with the same beginning is on its way: 12 of the 20 tokens need not be computed twice."""
    for num_free_rows, decision in ((4, "later"), (0, "there")):  # without a free row there is nothing to wait for
        rule = policy(num_free_rows=num_free_rows, num_common=12, bringing_kv=[source()])
        decided = rule.decide(waiting(), Spared(), NOW_S)
        assert kind_of(decided) == decision
        assert not isinstance(decided, Later) or decided.num_tokens == PROMPT_LEN - 12


def source(**state: Any) -> Any:
    """Returns a request that brings KV, with these fields."""
    key = CacheKey(np.arange(PROMPT_LEN), "")
    kept = {"cache_key": key, "num_kept_tokens": 0, "brings_kv": True, "brings_it_in_chunks": True}
    return SimpleNamespace(**{**kept, "due_s": NOW_S, "replica": "", "phase": Phase.PREFILL, **state})


@pytest.mark.parametrize(
    ("state", "decision"),
    [
        ({"replica": "a"}, "later"),
        ({"replica": "a", "due_s": NOW_S + STEP_S, "level": 1}, "there"),  # the replica would serve this one earlier
        ({"replica": "a", "due_s": NOW_S + STEP_S - 0.1, "level": 1}, "later"),  # only rounding tells them apart
        ({"replica": "a", "due_s": NOW_S + STEP_S, "level": 0}, "later"),  # the best level has no order
        ({"replica": "gone", "phase": Phase.TRANSFER}, "later"),  # it is computed
        ({"due_s": NOW_S + STEP_S, "level": 1}, "later"),  # prompts that are computed here take turns
        ({"replica": "gone"}, "there"),
    ],
)
def test_a_request_does_not_wait_for_kv_that_may_come_later_than_its_own(state: dict[str, Any], decision: str) -> None:
    rule = policy(SHORT, READY, replace(GONE, address="gone"), num_common=12, bringing_kv=[source(**state)])
    assert kind_of(rule.decide(waiting(), Spared(), NOW_S)) == decision
    awaited = AwaitedKv(source(**state), num_tokens=12)
    assert kind_of(rule.decide(waiting(awaited=awaited), Spared(), NOW_S)) == decision


def test_what_a_row_needs() -> None:
    rule = policy()
    there, here = (rule.need_of(waiting(), Spared(), stays_home=stays_home) for stays_home in (False, True))
    assert (there.num_tokens, there.is_received, here.num_tokens, here.is_received) == (20, True, 20, False)
    assert there.key is not None and here.key is not None
    scored = waiting(sampling=ResolvedSampling(seed=0, max_tokens=8, temperature=0.0, num_prompt_logprobs=1))
    assert rule.need_of(scored, Spared(), stays_home=True).key is None, "all of a scored prompt is computed"
    no_token = waiting(sampling=ResolvedSampling(seed=0, max_tokens=0, temperature=0.0))
    nothing = rule.need_of(no_token, Spared(), stays_home=False)
    assert (nothing.num_tokens, nothing.key, nothing.is_received) == (0, None, False), "its KV is used by nobody"


def test_a_replica_that_lost_a_row_is_avoided_if_there_is_another() -> None:
    other = Replica("b", True, instance_id="b")
    for replicas, address in (((READY, other), "b"), ((READY,), "a")):
        decided = policy(SHORT, *replicas).decide(waiting(avoid_replica="a"), Spared(), NOW_S)
        assert isinstance(decided, HandOver) and [each.address for each in decided.candidates] == [address]


TIMEOUT_S = SHORT.prefill_timeout_s


@pytest.mark.parametrize(
    ("error", "limit_s", "config", "replica", "request_state"),
    [
        (None, None, SHORT, READY, {}),
        (PrefillUnavailable, NOW_S + TIMEOUT_S, SHORT, GONE, {}),
        (PrefillUnavailable, NOW_S - 3 + TIMEOUT_S, SHORT, GONE, {"since_s": NOW_S - 3}),
        (FingerprintMismatch, NOW_S, SHORT, OTHER_MODEL, {}),
        (None, None, FALLBACK, GONE, {}),
        (ContextExceeded, NOW_S, SHORT, SMALL, {}),
    ],
)
def test_when_a_request_fails(
    error: type[Exception] | None,
    limit_s: float | None,
    config: DecodeConfig,
    replica: Replica,
    request_state: Mapping[str, Any],
) -> None:
    found = policy(config, replica, gone_for_s=4.0).failure_of(waiting(**request_state), NOW_S)
    told = (None, None) if found is None else (type(found.error), found.limit_s)
    assert told == (error, limit_s)
    assert found is None or not found.is_refusal


def test_a_request_that_a_larger_replica_may_take_is_refused_from_now_on() -> None:
    rule = policy(SHORT, SMALL, Replica("b", False, error=PrefillUnavailable("")))
    for since_s, limit_s in ((None, NOW_S + TIMEOUT_S), (NOW_S - 2, NOW_S - 2 + TIMEOUT_S)):
        failure = rule.failure_of(waiting(refused_since_s=since_s), NOW_S)
        assert failure is not None and failure.is_refusal and failure.limit_s == limit_s


@pytest.mark.parametrize(
    ("is_given_up", "config", "replica", "request_state", "lost"),
    [
        (True, SHORT, READY, {}, {"is_retryable": False}),
        (False, SHORT, READY, {"num_failures": 2}, {}),
        (True, SHORT, READY, {"num_failures": 3}, {}),
        (False, SHORT, READY, {"num_failures": 2, "refused_since_s": 0.0}, {}),  # it was not refused this time
        (False, SHORT, READY, {"refused_since_s": NOW_S - TIMEOUT_S + 1}, {"is_refusal": True}),
        (True, SHORT, READY, {"refused_since_s": NOW_S - TIMEOUT_S}, {"is_refusal": True}),
        (False, FALLBACK, GONE, {"refused_since_s": NOW_S - TIMEOUT_S}, {"is_refusal": True}),
    ],
)
def test_which_lost_rows_are_given_up(
    is_given_up: bool, config: DecodeConfig, replica: Replica, request_state: dict[str, Any], lost: dict[str, Any]
) -> None:
    row = LostRow(waiting(**request_state), PrefillUnavailable(""), **{"is_retryable": True, **lost})
    assert policy(config, replica).is_given_up(row, NOW_S) == is_given_up


@pytest.mark.parametrize(
    ("is_excused", "replica", "request_state", "was_short"),
    [
        (True, READY, {"refused_since_s": NOW_S - 1}, True),
        (True, READY, {"refused_since_s": NOW_S - 1, "awaited": _OnItsWay()}, False),
        (False, READY, {"refused_since_s": NOW_S - 1}, False),
        (False, READY, {}, True),
        (False, READY, {"refused_since_s": NOW_S - 1, "not_before_s": NOW_S + 1}, True),
        (False, SMALL, {"refused_since_s": NOW_S - 1}, True),
    ],
)
def test_time_that_this_service_costs_is_no_refusal(
    is_excused: bool, replica: Replica, request_state: dict[str, Any], was_short: bool
) -> None:
    assert policy(SHORT, replica).is_excused(waiting(**request_state), NOW_S, was_short=was_short) == is_excused


def test_a_service_is_degraded_a_while_after_the_last_replica() -> None:
    assert policy(FALLBACK, GONE, gone_for_s=0.5).degraded_from_s == NOW_S + 0.5
    assert policy(FALLBACK, READY, gone_for_s=5.0).degraded_from_s == math.inf
    assert policy(SHORT, GONE, gone_for_s=5.0).degraded_from_s == math.inf
