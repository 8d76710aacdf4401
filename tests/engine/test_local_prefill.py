"""Tests of prompts that the decode service computes itself, because they are short or because no replica is ready.
Their tokens are those of a handoff, and beside the running rows there is at most one forward of prompt chunks, of
bounded size.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest

from common.errors import ContextExceeded, FingerprintMismatch, InvalidRequest, PrefillUnavailable
from common.grammar.matcher import ALL_ALLOWED, Mask
from common.kv.pool import KvPool
from common.prompts.chunk_batch import ChunkBatch
from common.prompts.worker import LaunchedChunks, PromptWorker
from common.sampling.state import SamplingState
from decode_service.messages import CallEnded, DegradedChanged, Phase, Replica, ReplicasChanged, RowTaken
from decode_service.schedule.local_prefill import LocalPrefill
from decode_service.schedule.request import Request
from tests.engine.checks import breaking, broken_by, holding
from tests.engine.harness import REPLICA, Clock, Damage, ScriptedEngine, assert_right
from tests.engine.mutants import local_prefill, prefixes
from tests.engine.speculating import CHAIN, TREE
from tests.engine.tags import TagMatcher

LIMIT = 8
SHAPES = {"plain": None, "chain": CHAIN, "tree": TREE}
NO_REPLICA = ReplicasChanged((Replica(REPLICA, False),))
"""The report that the only prefill replica is not ready."""


class NotedChunks:
    """Records the number of tokens of each forward of prompt chunks."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_tokens: list[int] = []
        forward = PromptWorker.forward

        def noting(worker: PromptWorker, batch: ChunkBatch[Any], *arguments: Any, **options: Any) -> LaunchedChunks:
            self.num_tokens.append(batch.num_tokens)
            return forward(worker, batch, *arguments, **options)

        patch.setattr(PromptWorker, "forward", noting)


AT_ONCE = {"fallback_after_s": 0.0, "fallback_chunk_tokens": LIMIT}
"""Options of an engine that falls back at once, in small chunks."""


def alone(**options: Any) -> ScriptedEngine:
    """Returns a decode engine without a replica, whose clock stands still."""
    return ScriptedEngine(local_prefill_tokens=LIMIT, replicas=NO_REPLICA, clock=lambda: 0.0, **{**AT_ONCE, **options})


LONG_AFTER_S = 1000.0


def degraded(**options: Any) -> ScriptedEngine:
    """Returns a decode engine that has no replica and computes all prompts itself."""
    return ScriptedEngine(
        **{
            "local_prefill_tokens": LIMIT,
            "prefill_fallback": True,
            "replicas": NO_REPLICA,
            "clock": Clock(),
            **AT_ONCE,
            **options,
        }
    )


def phases(scripted: ScriptedEngine) -> dict[str, Phase]:
    return {request_id: req.phase for request_id, req in scripted.engine.lives.requests.items()}


def begun(scripted: ScriptedEngine) -> list[str]:
    """Returns the requests whose prompts the decode service is computing."""
    return [request_id for request_id, phase in phases(scripted).items() if phase is Phase.LOCAL_PREFILL]


def lose_replica(scripted: ScriptedEngine) -> None:
    """Lets the replica be lost, and with it all rows that were handed to it."""
    scripted.post(NO_REPLICA)
    for call_id in {handoff.call_id for handoff in scripted.handoffs.values()}:
        scripted.post(CallEnded(call_id, PrefillUnavailable("killed")))
    scripted.handoffs.clear()


def check_short_prompts_need_no_replica() -> None:
    for spec_info in SHAPES.values():
        for overlap in (True, False):
            scripted = alone(spec_info=spec_info, overlap=overlap)
            outcomes = [
                scripted.submit(str(length), range(1, length + 1), 7, temperature=float(length % 2), seed=length)
                for length in range(1, LIMIT + 1)
            ]
            scripted.run()
            assert_right(*outcomes)
            assert all(outcome.finished and not outcome.finished.timings.kv_bytes for outcome in outcomes)


@broken_by(local_prefill.cached_tokens_are_left_to_compute, "not over")
def check_what_is_cached_counts_as_computed() -> None:
    """A conversation whose turns are short is computed in the decode service, however long it gets."""
    for spec_info in SHAPES.values():
        scripted = alone(spec_info=spec_info)
        prompt = [5, 6, 7, 8, 9]
        for turn in range(5):
            outcome = scripted.submit(str(turn), prompt, 6, cache_salt="")
            scripted.run()
            assert_right(outcome)
            prompt = [*prompt, *outcome.token_ids, 20 + turn, 30 + turn]
        assert scripted.engine.load().prefixes.num_found > 4 * LIMIT


@broken_by(local_prefill.prompts_all_stay, "a burst of prompts")
def check_a_chunk_is_bounded() -> None:
    """A chunk stays within the limit even when several prompts wait: the prompts that exceed it are handed off."""
    with pytest.MonkeyPatch.context() as patch:
        noted = NotedChunks(patch)
        scripted = ScriptedEngine(max_rows=8, local_prefill_tokens=LIMIT)
        outcomes = [scripted.submit(str(number), range(1, 6), 12, seed=number) for number in range(6)]
        scripted.step()
        assert len(scripted.handoffs) == 5, "a burst of prompts was computed here"
        scripted.run()
        assert_right(*outcomes)
        assert noted.num_tokens and max(noted.num_tokens) <= LIMIT


@broken_by(local_prefill.only_short_turns_stay, "a whole chat goes")
def check_a_long_turn_stays_where_its_chat_is() -> None:
    """If a chat's other turns were short, the replica would have to compute all of it, so a long turn is computed in
    the decode service. If the replica has the chat's KV, the long turn is handed off.
    """
    caching = ReplicasChanged((Replica(REPLICA, True, instance_id="1", max_cached_tokens=1000),))
    for opening, num_turns, stays in ((4, 5, True), (30, 1, False)):
        scripted = ScriptedEngine(max_rows=8, local_prefill_tokens=LIMIT, replicas=caching)
        chats = [[number * 100 + place for place in range(opening)] for number in range(1, 3)]
        for turn in range(num_turns):
            for number, chat in enumerate(chats):
                outcome = scripted.submit(f"{number} {turn}", chat, 5, cache_salt="")
                scripted.run()
                assert_right(outcome)
                chat += [*outcome.token_ids, 900 + turn]
        with pytest.MonkeyPatch.context() as patch:
            noted = NotedChunks(patch)
            last = []
            for number, chat in enumerate(chats):
                chat += range(500, 500 + LIMIT)
                last.append(scripted.submit(f"{number} last", chat, 6, cache_salt=""))
            scripted.step()
            assert list(scripted.handoffs) == (["1 last"] if stays else ["0 last", "1 last"]), "a whole chat goes"
            scripted.run()
            assert_right(*last)
            assert max(noted.num_tokens, default=0) <= LIMIT


@broken_by(local_prefill.fallback_keeps_the_limit, "a short one waits")
def check_chunks_are_larger_while_no_replica_is_ready() -> None:
    """While no replica is ready, a prompt that fits in one of the larger chunks counts as short, even if it exceeds
    `local_prefill_tokens`.
    """
    with pytest.MonkeyPatch.context() as patch:
        noted = NotedChunks(patch)
        scripted = degraded(local_prefill_tokens=LIMIT // 2)
        outcomes = [scripted.submit("first", range(1, 3 * LIMIT), 3), scripted.submit("second", range(1, LIMIT), 3)]
        scripted.step()
        assert begun(scripted) == ["first", "second"], "a short one waits"
        scripted.run()
        assert_right(*outcomes)
        assert max(noted.num_tokens) == LIMIT


@broken_by(local_prefill.chunk_holds_no_row, "reused under a chunk")
@broken_by(local_prefill.free_rows_are_not_noticed, "not over after")
def check_a_chunk_in_flight_holds_its_row() -> None:
    """A request is aborted before its chunk has run, and another request needs its row."""
    scripted = alone(max_rows=2)
    runner = scripted.submit("runner", [1, 2], 9)
    while not scripted.engine.load().num_running:
        scripted.step()
    scripted.submit("leaver", range(1, 8), 4)
    scripted.step()
    scripted.abort("leaver")
    hungry = scripted.submit("hungry", range(11, 18), 4)
    scripted.step()
    assert scripted.engine.lives.requests["hungry"].phase is Phase.QUEUE, "a row was reused under a chunk"
    scripted.run()
    assert_right(runner, hungry)


def test_the_edge_is_told_of_the_row_of_a_prompt_that_is_computed_here() -> None:
    scripted = ScriptedEngine(max_rows=1, local_prefill_tokens=LIMIT)
    scripted.submit("first", [1, 2], 3)
    scripted.submit("waits", [1, 2], 3)
    assert [event for event in scripted.step() if isinstance(event, RowTaken)] == [RowTaken("first")]
    scripted.run()


def resets_that_fail(num_times: int) -> AbstractContextManager[object]:
    """Lets the first forwards of prompts fail within the block, as they set their rows' sampling state."""
    failures = [RuntimeError("planted")] * num_times
    return mock.patch.object(SamplingState, "reset", side_effect=[*failures, *[None] * 9])


@broken_by(local_prefill.unwritten_kv_is_kept, "decoded wrongly|KV was kept")
def check_a_failed_chunk_is_computed_again() -> None:
    with resets_that_fail(1):
        scripted = alone()
        outcome = scripted.submit("r", range(1, 8), 4, cache_salt="")
        scripted.run()
    assert_right(outcome)
    load = scripted.engine.load()
    assert (load.num_row_retries, load.prefixes.num_found) == (1, 0), "a failed chunk's KV was kept"


def check_a_chunk_that_always_fails_fails_its_request() -> None:
    with resets_that_fail(9):
        scripted = alone()
        outcome = scripted.submit("r", range(1, 8), 4)
        scripted.run()
    assert str(outcome.error) == "a prefill step failed: planted"


@broken_by(prefixes.damaged_kv_stays, "was used again")
def check_damaged_kv_fails_its_request_and_is_forgotten() -> None:
    scripted = alone()
    damage = Damage(scripted)
    seen = scripted.submit("sound", [1, 2, 3, 4], 2, cache_salt="")
    scripted.run()
    damage.is_due = True
    struck = scripted.submit("struck", [7, 2, 3, 4, 5], 2, cache_salt="")
    scripted.run()
    assert_right(seen)
    assert str(struck.error) == "the model produced no finite logit"
    again = scripted.submit("again", [7, 2, 3, 4, 5], 2, cache_salt="")
    scripted.run()
    assert_right(again)
    assert not scripted.engine.load().prefixes.num_found, "damaged KV was used again"


@broken_by(local_prefill.long_prompts_hold_up_short_ones, "request 0 failed: None")
def check_a_long_prompt_holds_up_no_short_one() -> None:
    """There is no replica and no fallback, so the long prompt cannot be computed yet."""
    scripted = alone()
    long = scripted.submit("long", range(1, 30), 2)
    short = scripted.submit("short", [1, 2, 3], 3)
    for _ in range(12):
        scripted.step()
        scripted.forward.run_all()
    assert_right(short)
    assert not long.has_ended
    assert scripted.engine.load().num_queued == 1


def check_a_failed_prompt_keeps_its_turn() -> None:
    """One client sends two prompts, and there is a row for one at a time. The older prompt's first chunk fails, and is
    computed again before the younger prompt.
    """
    started: list[str] = []
    begin = LocalPrefill.begin

    def noting(local: LocalPrefill, req: Request) -> None:
        started.append(req.request_id)
        begin(local, req)

    with (
        resets_that_fail(1),
        mock.patch.object(LocalPrefill, "begin", noting),
    ):
        scripted = alone(max_rows=1)
        scripted.submit("old", [1, 2, 3, 4, 5], 1)
        scripted.submit("young", [1, 2, 3, 4, 6], 1)
        scripted.run()
    assert started == ["old", "old", "young"]


@broken_by(local_prefill.fallback_is_forgotten, "not over")
def check_long_prompts_need_no_replica() -> None:
    for spec_info in SHAPES.values():
        for options in ({}, {"overlap": False}, {"local_prefill_tokens": 0}):
            clock = Clock()
            scripted = degraded(spec_info=spec_info, clock=clock, **options)
            outcomes = [
                scripted.submit(str(length), range(1, length + 1), 7, temperature=float(length % 2), seed=length)
                for length in (3, LIMIT + 1, 2 * LIMIT, 40)
            ]
            for _ in range(4):
                scripted.step()
                clock.now_s += LONG_AFTER_S
            scripted.run()
            assert_right(*outcomes)
            assert all(outcome.finished and not outcome.finished.timings.kv_bytes for outcome in outcomes)


def check_without_the_fallback_a_long_prompt_fails() -> None:
    clock = Clock()
    scripted = degraded(prefill_fallback=False, clock=clock)
    outcome = scripted.submit("long", range(1, 30), 2)
    scripted.step()
    clock.now_s += LONG_AFTER_S
    scripted.step()
    assert isinstance(outcome.error, PrefillUnavailable)
    assert not scripted.engine.load().is_degraded


@broken_by(local_prefill.long_prompts_begin_together, "two long prompts")
def check_one_long_prompt_is_computed_at_a_time() -> None:
    """The other long prompts wait for it, as long as it takes. Chunks stay as small as those of short prompts."""
    with pytest.MonkeyPatch.context() as patch:
        noted, clock = NotedChunks(patch), Clock()
        scripted = degraded(clock=clock)
        outcomes = [scripted.submit(str(number), range(1, 24 + number), 3, seed=number) for number in range(4)]
        while not all(outcome.has_ended for outcome in outcomes):
            scripted.step()
            assert len(begun(scripted)) <= 1, "two long prompts began"
            scripted.forward.run_all()
            clock.now_s += LONG_AFTER_S
        assert_right(*outcomes)
        assert max(noted.num_tokens) <= LIMIT


@broken_by(local_prefill.long_prompts_count_as_short, "waited for a long one")
@broken_by(local_prefill.the_oldest_prompt_is_always_first, "waited for a long one")
def check_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """The chunks of a long prompt and of short ones take turns. A steady stream of short prompts does not hold up the
    long one either.
    """
    scripted = degraded(max_rows=8)
    long = scripted.submit("long", range(1, 60), 2)
    scripted.step()
    waits = []
    for number in range(12):
        short = scripted.submit(str(number), range(1, LIMIT), 1, seed=number)
        num_steps = 0
        while not short.has_ended:
            scripted.step()
            scripted.forward.run_all()
            num_steps += 1
        waits.append(num_steps)
        assert_right(short)
    assert max(waits) < 8, f"a short prompt waited for a long one: {waits}"
    assert long.has_ended, "a long prompt waited for short ones"
    scripted.run()
    assert_right(long)


@broken_by(local_prefill.fallback_never_ends, "was passed over")
def check_a_ready_replica_gets_the_next_request() -> None:
    """A prompt that was begun in the decode service is finished there. All others go to the replica once it is
    ready.
    """
    scripted = degraded()
    first, second = (scripted.submit(name, range(1, 40), 3) for name in ("first", "second"))
    scripted.step()
    assert scripted.engine.load().is_degraded
    scripted.post(ReplicasChanged((Replica(REPLICA, True),)))
    scripted.step()
    assert begun(scripted) == ["first"], "a prompt that had begun here was given up"
    scripted.run()
    third = scripted.submit("third", range(1, 40), 3)
    scripted.run()
    assert_right(first, second, third)
    ended = [outcome.finished.timings.num_handoff_attempts for outcome in (first, second, third) if outcome.finished]
    assert ended == [0, 1, 1], "a ready replica was passed over"
    assert not scripted.engine.load().is_degraded


@pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "not looked at yet"])
def test_a_long_prompt_begins_here_only_if_no_replica_is_ready_for_a_while(
    is_lost: bool,
) -> None:
    """Short prompts begin at once, and no request fails meanwhile."""
    clock = Clock()
    replicas = ReplicasChanged((Replica(REPLICA, is_lost),))
    scripted = degraded(clock=clock, replicas=replicas, fallback_after_s=1.0)
    long = scripted.submit("long", range(1, 30), 3)
    scripted.step()
    if is_lost:
        lose_replica(scripted)
    short = scripted.submit("short", [1, 2, 3], 3)
    clock.now_s += 0.9
    scripted.step()
    assert begun(scripted) == ["short"]
    assert not scripted.engine.load().is_degraded
    if is_lost:
        scripted.post(ReplicasChanged((Replica(REPLICA, True),)))
        scripted.step()
        assert list(scripted.handoffs) == ["long"], "the replica was ready again"
    else:
        clock.now_s += 0.2
        scripted.step()
        assert "long" in begun(scripted)
        assert scripted.engine.load().is_degraded
    scripted.run()
    assert_right(long, short)


def test_it_is_told_when_and_why_all_prompts_are_computed_here_and_when_no_more() -> None:
    """An event tells the edge when the decode service begins to compute all prompts itself, and when it stops. The
    reported load says so too after each step, even without requests. A short loss of the replica shows in neither.
    """
    clock = Clock()
    lost = ReplicasChanged((Replica(REPLICA, False, error=PrefillUnavailable("refused")),))
    ready = ReplicasChanged((Replica(REPLICA, True),))
    scripted = degraded(clock=clock, replicas=ready, fallback_after_s=1.0)
    for replicas, now_s, is_degraded, told in (
        (lost, 10.0, False, []),
        (ready, 10.9, False, []),
        (lost, 20.0, False, []),
        (lost, 20.9, False, []),
        (lost, 21.0, True, [DegradedChanged(True, f"{REPLICA}: refused")]),
        (lost, 30.0, True, []),
        (ready, 30.1, False, [DegradedChanged(False)]),
    ):
        clock.now_s = now_s
        scripted.post(replicas)
        assert scripted.step() == told
        assert scripted.engine.load().is_degraded is is_degraded


def check_replicas_of_another_model_are_not_needed() -> None:
    mismatch = FingerprintMismatch("weights", "ours", "theirs")
    scripted = degraded(replicas=ReplicasChanged((Replica(REPLICA, False, error=mismatch),)))
    outcome = scripted.submit("r", range(1, 30), 3)
    scripted.run()
    assert_right(outcome)


def check_a_prompt_too_long_for_the_ready_replicas_fails() -> None:
    """The prompt is refused as it would be without the fallback: the error tells the caller the limit."""
    small = ReplicasChanged((Replica(REPLICA, True, max_context_tokens=20),))
    scripted = degraded(replicas=small)
    outcome = scripted.submit("r", range(1, 30), 3)
    scripted.step()
    assert isinstance(outcome.error, ContextExceeded)


@broken_by(local_prefill.each_step_looks_at_the_queue, "again and again")
def check_a_queue_costs_the_steps_nothing() -> None:
    """While a request runs and no other can start, the steps do not look at those that wait."""
    for options in ({"prefill_fallback": False}, {"max_rows": 1}):
        with mock.patch.object(KvPool, "num_cached", autospec=True, side_effect=KvPool.num_cached) as look:
            scripted = degraded(**options)
            runner = scripted.submit("runner", [1, 2], 30)
            while not scripted.engine.load().num_running:
                scripted.step()
                scripted.forward.run_all()
            waiting = [scripted.submit(str(number), range(1, 20), 2) for number in range(50)]
            scripted.step()
            num_looks = look.call_count
            for _ in range(10):
                scripted.step()
            assert look.call_count <= num_looks + 1, "steps looked at the queue again and again"
            assert not runner.has_ended and not any(outcome.has_ended for outcome in waiting)


def test_a_grammar_that_fails_at_the_first_token_fails_its_request_alone() -> None:
    """The grammar library reaches a limit while it computes the mask, and a token is drawn nevertheless."""

    def reach_a_limit(matcher: TagMatcher, mask: Mask) -> None:
        mask[:] = ALL_ALLOWED
        matcher.failure = "a limit of the grammar library"

    with mock.patch.object(TagMatcher, "fill", reach_a_limit):
        scripted = alone()
        failing = scripted.submit("failing", [1, 2], 4, is_constrained=True)
        other = scripted.submit("other", [3, 4], 4)
        scripted.run()
    assert isinstance(failing.error, InvalidRequest) and "a limit of the grammar" in str(failing.error)
    assert failing.token_ids == []
    assert_right(other)


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
