"""Tests of prefix reuse in the decode service: rows hold KV that earlier requests left, and ask prefill only for the
rest.

The tokens and drafts of a request show what it read: both are hashes of all its KV (tests/engine/tags.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import pytest

from common.device.stream import Event
from common.errors import PrefillUnavailable, RowFailure
from common.kv.pool import KvPool
from common.sampling.params import ResolvedSampling
from common.wire.handoff import RowFailed
from decode_service.messages import CallEnded, FrameArrived, Phase, Replica, ReplicasChanged
from decode_service.speculate.spec_info import SpecInfo
from tests.engine.checks import breaking, broken_by, holding
from tests.engine.harness import REPLICA, Clock, Damage, Outcome, ScriptedEngine, assert_right, places
from tests.engine.mutants import prefixes, rows
from tests.engine.speculating import CHAIN, NOTHING, SEED, TREE, ScriptedDepth, a_step_that_tells
from tests.engine.tag_head import DRAFT
from tests.engine.tags import GROUP, oracle
from tests.support.scripted_device import ScriptedDevice, run_needed

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
OTHER = (700, 701, 702, 703)
SALT = "salt"
GREEDY = ResolvedSampling(seed=0, max_tokens=1, temperature=0.0)


def serve(scripted: ScriptedEngine, request_id: str, prompt: Sequence[int], max_tokens: int, **options: object) -> int:
    """Runs a request alone to its end, and checks its tokens. Returns the number of tokens whose KV it found in the
    cache.
    """
    outcome = scripted.submit(request_id, prompt, max_tokens, **{"cache_salt": SALT, **options})  # type: ignore
    scripted.step()
    assert request_id in scripted.handoffs, f"{request_id} was not handed off: {scripted.engine.load()}"
    num_held = scripted.handoffs[request_id].num_held
    assert num_held < len(prompt), "no token was left to compute"
    scripted.run()
    assert_right(outcome)
    return num_held


# ---- P1: held prefixes ------------------------------------------------------------------------------------------


@broken_by(prefixes.prefix_is_found_and_not_held, "decoded wrongly")
def check_a_held_prefix_is_not_given_to_another_row() -> None:
    """A running request holds all KV that is cached, and another one needs slots."""
    scripted = ScriptedEngine(headroom_tokens=1, max_rows=2, max_kv_tokens=40)
    serve(scripted, "first", PROMPT, 2)
    holder = scripted.submit("holder", PROMPT, 24, cache_salt=SALT)
    scripted.start("holder")
    hungry = scripted.submit("hungry", range(100, 112), 20)
    scripted.run()
    assert scripted.engine.load().prefixes.num_found == len(PROMPT) - 1, "nothing was reused"
    assert_right(holder, hungry)


@broken_by(prefixes.prefix_is_let_go_before_quarantine_ends, "let go while a forward may read it")
@broken_by(rows.quarantine_ends_too_early, "let go while")
def check_a_prefix_in_quarantine_is_not_given_to_another_row() -> None:
    """The holder is aborted while its forward is in flight, and another request needs the slots of its prefix."""
    scripted = ScriptedEngine(max_rows=2, max_kv_tokens=14)
    serve(scripted, "first", PROMPT, 2)
    scripted.submit("holder", PROMPT, 4, cache_salt=SALT)
    scripted.start("holder")
    read = scripted.engine.pool.rows.req_to_token[1:].flatten()
    scripted.abort("holder")
    scripted.submit("hungry", range(100, 112), 2)
    seen = []

    def look(device: ScriptedDevice, event: Event) -> None:
        load = scripted.engine.load()
        seen.append((load.rows.reserved, load.slots.cached))
        run_needed(device, event)

    scripted.device.on_synchronize = look
    scripted.step()
    assert read.any() and seen == [(0, 1)], f"a prefix was let go while a forward may read it: {seen}"
    scripted.run()
    assert scripted.engine.load().prefixes.num_evicted > 0, "nobody needed the slots"


# ---- P2: only the rest is asked for -----------------------------------------------------------------------------


@broken_by(prefixes.held_tokens_are_asked_for, "came twice")
@broken_by(prefixes.landing_awaits_held_tokens, "before this row was complete")
@broken_by(prefixes.whole_prompt_may_be_held, "no token was left")
def check_only_what_is_not_held_is_asked_for() -> None:
    """The KV of the model and of the draft head is held and landed alike. A prompt that is cached as a whole leaves one
    token to compute. If a prompt differs from the cached tokens at some point, the head's KV of the token before that
    is not shared, because it depends on the next token.
    """
    for spec_info, token_bytes in ((None, GROUP.token_bytes), (CHAIN, GROUP.token_bytes + DRAFT.token_bytes)):
        scripted = ScriptedEngine(spec_info=spec_info)
        assert serve(scripted, "cold", PROMPT, 6) == 0, "something was there before the first request"
        said = (*PROMPT, *scripted.outcomes["cold"].token_ids)
        for name, prompt, num_wanted in (
            ("same", PROMPT, len(PROMPT) - 1),
            ("whole", said[:-1], len(said) - 2),
            ("longer", (*said, 42, 43), len(said) - 1 if spec_info else len(said)),
            ("branching", (*PROMPT[:5], 900, 901), 4 if spec_info else 5),
        ):
            num_held = serve(scripted, name, prompt, 3)
            assert num_held == num_wanted, f"{name}: {num_held} tokens were held, not {num_wanted}"
            finished = scripted.outcomes[name].finished
            num_bytes = (len(prompt) - num_held) * token_bytes
            assert finished is not None and finished.timings.kv_bytes == num_bytes, "other KV came than was asked for"


# ---- P3: conservation -------------------------------------------------------------------------------------------


# ---- P4: namespaces ---------------------------------------------------------------------------------------------


@broken_by(prefixes.namespaces_are_one, "what another namespace left")
@broken_by(prefixes.no_salt_is_the_common_namespace, "without a salt uses the cache")
def check_namespaces_share_nothing() -> None:
    scripted = ScriptedEngine()
    for salt in (None, SALT, "other", "", None):
        num_held = serve(scripted, f"first of {salt}", PROMPT, 4, cache_salt=salt)
        assert num_held == 0, f"{salt!r} uses what another namespace left"
        num_kept = scripted.engine.load().slots.cached
        num_held = serve(scripted, f"second of {salt}", PROMPT, 4, cache_salt=salt)
        if salt is None:
            assert num_held == 0, "a request without a salt uses the cache"
            assert scripted.engine.load().slots.cached == num_kept, "a request without a salt leaves its KV"
        else:
            assert num_held == len(PROMPT) - 1, f"{salt!r} does not use what it left itself"
        scripted.outcomes.clear()


# ---- P5: only committed KV is kept ------------------------------------------------------------------------------


def speculation_of(outcome: Outcome) -> tuple[tuple[int, ...], tuple[int, ...]]:
    assert outcome.finished is not None and outcome.finished.speculation is not None
    return outcome.finished.speculation.drafted_at, outcome.finished.speculation.accepted_at


@broken_by(prefixes.last_token_is_kept, r"tokens for \d+ slots")
@broken_by(prefixes.unread_tokens_are_kept, "drafts were not those")
def check_only_committed_kv_is_kept() -> None:
    """A request ends by its limit, at a stop token or by an abort, and another one goes on where it ended. The second
    request must get the same tokens and drafts as without a cache.
    """
    for spec_info, depths in (
        (None, [None]),
        (CHAIN, [CHAIN]),
        (TREE, [TREE]),
        (CHAIN, [CHAIN, *[NOTHING] * 20]),
        (CHAIN, [NOTHING, NOTHING, SEED, CHAIN]),
        (TREE, [TREE, *[TREE.at_depth(0).without_seed()] * 3, TREE.at_depth(0), TREE]),
    ):
        for ending in ("length", "stop", "abort"):
            for num_tokens in (2, 3, 5, 8):
                depth = ScriptedDepth([each for each in depths if each], deepest=spec_info) if spec_info else None
                warm = ScriptedEngine(spec_info=spec_info, depth=depth)
                first = _end_at(warm, ending, num_tokens)
                longer = (*PROMPT, *first.token_ids, 77, 78)
                if depth is not None:
                    depth.script([spec_info])  # type: ignore[list-item]
                num_held = serve(warm, "second", longer, 12)
                num_unread = sum(each in (NOTHING, TREE.at_depth(0).without_seed()) for each in depths)
                assert num_held >= len(PROMPT) + max(len(first.token_ids) - 1 - num_unread, 0), "too little was kept"
                if spec_info is not None:
                    cold = ScriptedEngine(spec_info=spec_info)
                    serve(cold, "second", longer, 12, cache_salt=None)
                    drafts, wanted = (speculation_of(each.outcomes["second"]) for each in (warm, cold))
                    assert drafts == wanted, f"{ending} after {num_tokens}: drafts were not those of the sequence"


def _end_at(scripted: ScriptedEngine, ending: str, num_tokens: int) -> Outcome:
    if ending == "length":
        serve(scripted, "first", PROMPT, num_tokens)
    elif ending == "stop":
        stop = oracle(PROMPT, num_tokens, GREEDY)[-1]
        serve(scripted, "first", PROMPT, 24, stop_token_ids=(stop,))
    else:
        outcome = scripted.submit("first", PROMPT, 24, cache_salt=SALT)
        scripted.start("first")
        while len(outcome.token_ids) < num_tokens:
            scripted.step()
        scripted.abort("first")
        scripted.run()
    return scripted.outcomes["first"]


@broken_by(prefixes.heads_kv_depends_on_no_later_token, "drafts were not those")
def check_a_heads_kv_is_shared_only_with_what_it_read() -> None:
    """Two sequences differ in one token. The head's KV at the position before that token depends on it, so it must not
    be shared.
    """
    scripted = ScriptedEngine(spec_info=CHAIN)
    serve(scripted, "first", PROMPT, 6)
    branching = (*PROMPT[:5], 900, 901)
    serve(scripted, "branching", branching, 24)
    outcome = scripted.outcomes["branching"]
    expected = outcome.expected_drafting(CHAIN)
    assert outcome.drafting == expected, f"drafts were not those of the sequence: {outcome.drafting}, not {expected}"


# ---- P6: retraction and eviction --------------------------------------------------------------------------------


@broken_by(prefixes.output_is_not_kept, "came back")
def check_a_retracted_request_returns_to_what_it_left() -> None:
    """A younger request is retracted, and the older one needs only a few of its slots. So the younger one finds most of
    its KV when it returns.
    """
    scripted = ScriptedEngine(max_rows=2, max_kv_tokens=64)
    older = scripted.submit("older", range(200, 220), 24, cache_salt=SALT)
    younger = scripted.submit("younger", PROMPT[:4], 30, cache_salt=SALT)
    scripted.start("older", "younger")
    while "younger" not in scripted.handoffs:
        assert not younger.has_ended, "nothing was retracted"
        scripted.step()
    num_tokens = len(younger.prompt) + len(younger.token_ids)
    handoff = scripted.handoffs["younger"]
    assert handoff.num_held > len(younger.prompt), f"of {num_tokens} tokens {handoff.num_held} came back"
    scripted.run()
    assert_right(older, younger)
    assert scripted.engine.load().num_retractions == 1


@broken_by(prefixes.evictable_slots_are_not_free, "was not handed off")
def check_requests_end_although_all_slots_are_cached() -> None:
    """Each request needs nearly all slots, and the requests before it leave all of them in the cache."""
    scripted = ScriptedEngine(max_rows=2, max_kv_tokens=40)
    for number in range(4):
        serve(scripted, str(number), range(100 * number + 1, 100 * number + 30), 10)
        load = scripted.engine.load()
        assert load.slots.cached + load.slots.free == load.slots.total
    assert load.slots.cached > 30


@broken_by(prefixes.evictable_slots_are_not_free, "not over")
def check_two_rows_with_the_same_tokens_come_to_an_end() -> None:
    """Two rows received the same KV at the same time, because their prompts have too little in common for one to wait
    for the other. The older one lands last and needs all slots there are.
    """
    for spec_info in (None, CHAIN):
        num_ahead = spec_info.num_slots - 1 if spec_info else 0
        scripted = ScriptedEngine(max_rows=2, max_kv_tokens=64 + num_ahead, spec_info=spec_info)
        prompts = {"older": (*PROMPT, *range(20, 29)), "younger": (*PROMPT, 9)}
        outcomes = [
            scripted.submit(name, prompt, 64 - len(prompt), cache_salt=SALT, temperature=1.0, seed=seed)
            for seed, (name, prompt) in enumerate(prompts.items())
        ]
        scripted.step()
        assert len(scripted.handoffs) == 2
        scripted.hand_over("younger")
        for _ in range(2):
            scripted.step()
            scripted.landing.run_all()
        scripted.hand_over("older")
        scripted.run()
        assert_right(*outcomes)


WAITING = tuple(range(40, 60))
"""A prompt that is not cached, and of which several requests come at once."""


def waiting(scripted: ScriptedEngine) -> list[str]:
    return [name for name, req in scripted.engine.lives.requests.items() if req.phase is Phase.QUEUE]


def test_rows_that_received_the_same_kv_at_once_hold_it_once() -> None:
    """Neither request waits for the other's KV, because less than a quarter of their prompts is the same."""
    num_held = []
    for salt in (None, SALT):
        scripted = ScriptedEngine(max_kv_tokens=200)
        prompts = [(*PROMPT, *range(start, start + 30)) for start in (100, 200)]
        outcomes = [scripted.submit(str(prompt[-1]), prompt, 20, cache_salt=salt) for prompt in prompts]
        scripted.start(*(str(prompt[-1]) for prompt in prompts))
        num_held.append(scripted.engine.load().slots.held)
        scripted.run()
        assert_right(*outcomes)
    assert num_held[0] - num_held[1] == len(PROMPT)


@broken_by(prefixes.nothing_is_waited_for, "did not wait")
def check_what_is_on_its_way_is_waited_for() -> None:
    """Several requests have the same prompt, which is not cached. All but the first share its slots and ask for one
    token each. A request of the same namespace with another beginning waits for nothing, and nor does one of another
    namespace.
    """
    for spec_info in (None, CHAIN, TREE):
        scripted = ScriptedEngine(max_rows=8, spec_info=spec_info)
        salts = {"a": SALT, "b": SALT, "c": SALT, "d": SALT, "salted": "another", "unsalted": None}
        outcomes = {
            name: scripted.submit(name, WAITING, 12, cache_salt=salt, temperature=1.0, seed=seed)
            for seed, (name, salt) in enumerate(salts.items())
        }
        outcomes["else"] = scripted.submit("else", OTHER, 12, cache_salt=SALT)
        scripted.step()
        assert waiting(scripted) == ["b", "c", "d"], "a choice did not wait for the first, or another request did"
        scripted.hand_over("a")
        scripted.step()
        assert waiting(scripted) == ["b", "c", "d"], "it went on before the KV was there"
        scripted.landing.run_all()
        scripted.step()
        assert not waiting(scripted)
        lookahead = max(1, 0 if spec_info is None else DRAFT.num_layers)
        assert {scripted.handoffs[name].num_held for name in "bcd"} == {len(WAITING) - lookahead}
        scripted.run()
        assert_right(*outcomes.values())


@pytest.mark.parametrize(
    ("spec_info", "token_bytes"), [(None, GROUP.token_bytes), (CHAIN, GROUP.token_bytes + DRAFT.token_bytes)]
)
def test_bytes_that_are_not_sent_count_once_for_a_row_that_lands(spec_info: SpecInfo | None, token_bytes: int) -> None:
    scripted = ScriptedEngine(spec_info=spec_info)
    serve(scripted, "first", PROMPT, 2)
    assert scripted.engine.load().held_bytes == 0
    again = scripted.submit("again", PROMPT, 3, cache_salt=SALT)
    scripted.step()
    scripted.post(CallEnded(scripted.handoffs.pop("again").call_id, PrefillUnavailable("killed")))
    scripted.run()
    assert again.finished is not None and again.finished.timings.num_handoff_attempts == 2
    assert scripted.engine.load().held_bytes == (len(PROMPT) - 1) * token_bytes


def test_nothing_would_have_been_sent_for_a_prompt_that_is_computed_here() -> None:
    scripted = ScriptedEngine(local_prefill_tokens=2)
    serve(scripted, "handed over", PROMPT, 2)
    here = scripted.submit("here", PROMPT, 3, cache_salt=SALT)
    scripted.run()
    assert here.finished is not None and here.finished.timings.num_handoff_attempts == 0
    assert scripted.engine.load().held_bytes == 0


def test_younger_requests_leave_a_row_to_each_that_waits_for_kv() -> None:
    scripted = ScriptedEngine(max_rows=4)
    older = [scripted.submit(name, WAITING, 5, cache_salt=SALT) for name in "abcd"]
    younger = [scripted.submit(name, [ord(name)], 5) for name in "XYZ"]
    for _ in range(2):
        scripted.step()
        assert list(scripted.handoffs) == ["a"], "a younger one took the row"
    scripted.hand_over("a")
    for _ in range(2):
        scripted.step()
        scripted.landing.run_all()
    assert list(scripted.handoffs) == ["b", "c", "d"]
    scripted.run()
    assert_right(*older, *younger)


@pytest.mark.parametrize(("max_kv_tokens", "starts"), [(120, True), (119, False)])
def test_younger_requests_leave_the_slots_that_one_that_waits_for_kv_will_not_share(
    max_kv_tokens: int, starts: bool
) -> None:
    """The younger request starts if the pool has room for the first request's 20 tokens, for the 10 that the waiting
    one will not share, for its own 42 tokens, and for the headroom of three rows.
    """
    scripted = ScriptedEngine(max_kv_tokens=max_kv_tokens)
    scripted.submit("source", WAITING, 2, cache_salt=SALT)
    scripted.submit("waits", (*WAITING, *range(200, 210)), 2, cache_salt=SALT)
    scripted.submit("younger", range(300, 342), 2)
    scripted.step()
    assert ("younger" in scripted.handoffs) is starts
    assert waiting(scripted)[0] == "waits"
    scripted.run()


def test_those_that_wait_for_kv_take_no_turn_of_another_client() -> None:
    scripted = ScriptedEngine(max_rows=4)
    for name in "abcdef":
        scripted.submit(name, WAITING, 5, client="many", cache_salt=SALT)
    for number in range(2):
        scripted.submit(str(number), OTHER, 5, client="another")
    scripted.step()
    assert list(scripted.handoffs) == ["a", "0", "1"]
    scripted.run()


def test_kv_that_may_come_later_than_a_requests_own_is_not_waited_for() -> None:
    """A request of a better priority does not wait for that of a worse one, and nobody for a replica that has left."""
    scripted = ScriptedEngine(clock=lambda: 0.0)
    scripted.submit("worse", WAITING, 5, cache_salt=SALT, priority=5)
    scripted.step()
    scripted.submit("better", WAITING, 5, cache_salt=SALT)
    scripted.submit("as bad", WAITING, 5, cache_salt=SALT, priority=5)
    scripted.step()
    assert waiting(scripted) == ["as bad"]
    left = Replica(REPLICA, False, error=PrefillUnavailable("it does not answer"))
    scripted.post(ReplicasChanged((left, Replica("another", True))))
    assert places(scripted.step()) == {"as bad": "another"}
    scripted.run()
    assert_right(*scripted.outcomes.values())


@broken_by(prefixes.sources_are_waited_for_for_ever, "took its place")
def check_a_source_that_leaves_is_waited_for_no_longer() -> None:
    """The request that was to bring the KV is aborted, refused, lost or fails. One of those that waited for it takes
    its place, and the others wait for that one.
    """
    killed = PrefillUnavailable("killed")
    leaves: dict[str, Callable[[ScriptedEngine], None]] = {
        "aborted": lambda scripted: scripted.abort("a"),
        "lost": lambda scripted: scripted.post(CallEnded(scripted.handoffs.pop("a").call_id, killed)),
        "refused": lambda scripted: scripted.refuse("a", RowFailure.CAPACITY),
        "failed": lambda scripted: scripted.refuse("a", RowFailure.COMPUTE, retryable=False),
    }
    for name, leave in leaves.items():
        scripted = ScriptedEngine(clock=lambda: 0.0)
        outcomes = [scripted.submit(each, WAITING, 5, cache_salt=SALT) for each in "abc"]
        scripted.step()
        assert waiting(scripted) == ["b", "c"]
        leave(scripted)
        scripted.step()
        assert len(scripted.handoffs) == 1, f"{name}: nobody took its place, or all did"
        (source,) = scripted.handoffs
        assert (source == "a") == (name == "lost")
        scripted.hand_over(source)
        for _ in range(2):
            scripted.step()
            scripted.landing.run_all()
        assert "c" in scripted.handoffs, f"{name}: the last one still waits"
        if name != "refused":
            scripted.run()
            assert all(each.token_ids == each.expected for each in outcomes if each.finished), name


@broken_by(prefixes.all_that_wait_are_sources, "not over")
def check_nobody_waits_for_one_that_only_waits() -> None:
    """There is one row. A request that still waits for a row can bring no KV, so no other may wait for it."""
    scripted = ScriptedEngine(max_rows=1)
    outcomes = [scripted.submit(name, WAITING, 5, cache_salt=SALT) for name in ("first", "second", "third")]
    scripted.run()
    assert_right(*outcomes)


@broken_by(prefixes.all_kv_counts_as_brought_in_chunks, "more than it saves")
def check_waiting_does_not_take_longer_than_what_it_saves() -> None:
    """A short prompt begins like a long one, but does not wait for it: the common KV is in the cache only when the
    whole long prompt has landed.
    """
    scripted = ScriptedEngine()
    scripted.submit("long", (*WAITING, *range(100, 121)), 3, cache_salt=SALT)
    scripted.submit("short", (*WAITING, 99), 3, cache_salt=SALT)
    scripted.submit("little in common", (*WAITING[:5], *range(200, 216)), 3, cache_salt=SALT)
    scripted.step()
    assert not waiting(scripted), "it waits for more than it saves"
    scripted.run()


@broken_by(prefixes.kept_chunks_are_not_noticed, "all of it")
def check_a_prompt_computed_here_is_waited_for_chunk_by_chunk() -> None:
    no_replica = ReplicasChanged((Replica(REPLICA, False),))
    scripted = ScriptedEngine(fallback_chunk_tokens=32, replicas=no_replica, prefill_fallback=True)
    long = scripted.submit("long", (*WAITING, *range(100, 130)), 3, cache_salt=SALT)
    short = scripted.submit("short", (*WAITING, 99), 3, cache_salt=SALT)
    scripted.step()
    assert waiting(scripted) == ["short"]
    while waiting(scripted):
        scripted.forward.run_all()
        scripted.step()
    assert scripted.engine.lives.requests["long"].phase is Phase.LOCAL_PREFILL, "it waited for all of it"
    scripted.run()
    assert_right(long, short)
    assert short.finished is not None and short.finished.timings.num_cached_tokens == len(WAITING)


def check_waiting_for_kv_counts_as_queueing() -> None:
    clock = Clock()
    scripted = ScriptedEngine(clock=clock)
    scripted.submit("a", WAITING, 2, cache_salt=SALT)
    follower = scripted.submit("b", WAITING, 2, cache_salt=SALT)
    scripted.step()
    clock.now_s += 5
    scripted.hand_over("a")
    scripted.run()
    assert follower.finished is not None
    assert (follower.finished.timings.queue_s, follower.finished.timings.prefill_s) == (5, 0)


def test_waiting_for_kv_does_not_count_as_time_for_which_replicas_refuse_a_request() -> None:
    clock = Clock()
    scripted = ScriptedEngine(clock=clock)
    refused = scripted.submit("refused", WAITING, 2, cache_salt=SALT)
    scripted.step()
    scripted.refuse("refused", RowFailure.CAPACITY)
    scripted.submit("source", WAITING, 2, cache_salt=SALT)
    scripted.step()
    for _ in range(9):
        clock.now_s += 3.0
        scripted.step()
    assert list(scripted.handoffs) == ["source"]
    scripted.hand_over("source")
    for _ in range(2):
        scripted.step()
        scripted.landing.run_all()
    scripted.step()
    scripted.refuse("refused", RowFailure.CAPACITY)
    scripted.step()
    assert refused.error is None, "it was given up"
    clock.now_s += 1.0
    scripted.run()
    assert_right(refused)


@broken_by(prefixes.waiting_is_begun_at_each_look, "looked at again")
def check_waiting_for_kv_costs_a_step_nothing() -> None:
    """While the awaited KV is on its way, no step compares prompts or looks into the cache."""
    with (
        mock.patch.object(KvPool, "num_common", autospec=True, side_effect=KvPool.num_common) as compare,
        mock.patch.object(KvPool, "num_cached", autospec=True, side_effect=KvPool.num_cached) as look,
    ):
        scripted = ScriptedEngine(max_rows=8)
        runner = scripted.submit("runner", [1, 2], 40)
        scripted.start("runner")
        for number in range(20):
            scripted.submit(str(number), WAITING, 2, cache_salt=SALT)
        scripted.step()
        compare.reset_mock()
        look.reset_mock()
        for number in range(5):
            scripted.submit(f"else {number}", [number], 2)  # new requests make the steps look at the queue
            scripted.step()
        assert not runner.has_ended and len(waiting(scripted)) >= 19
        assert not compare.called and not look.called, "waiting requests were looked at again"


@broken_by(prefixes.shared_slots_do_not_come_back, "gave way although")
def check_no_more_is_retracted_than_needed() -> None:
    """A request ends with the forward in flight. The others need more slots than it owns, but fewer than it frees
    together with those of its prefix. So none of them may be retracted.
    """
    scripted = ScriptedEngine(headroom_tokens=1, max_rows=4, max_kv_tokens=32)
    serve(scripted, "first", range(300, 310), 2)
    growing = [scripted.submit(name, [ord(name)], 10, cache_salt=SALT) for name in "abc"]
    scripted.start("a", "b", "c")
    leaving = scripted.submit("leaving", range(300, 310), 2, cache_salt=SALT)
    for _ in range(3):
        scripted.step()
    scripted.hand_over("leaving")
    num_left = []
    while not leaving.has_ended:
        slots = scripted.engine.load().slots
        num_left.append(slots.free + slots.cached)
        scripted.step()
        scripted.landing.run_all()
    scripted.run()
    assert_right(*growing, leaving)
    assert num_left[-1] == 0, f"slots were not short: {num_left}"
    assert scripted.engine.load().num_retractions == 0, "a request gave way although enough slots were coming"


# ---- P7: damaged KV ---------------------------------------------------------------------------------------------


@broken_by(prefixes.damaged_kv_stays, "damaged KV was used again")
@broken_by(prefixes.damaged_row_still_leaves_its_kv, "damaged KV was used again")
@broken_by(prefixes.damaged_row_is_retried_from_the_cache, "it may fail for the same reason")
def check_damaged_kv_is_forgotten() -> None:
    """A step's logits are not finite. The next request with these tokens must find none of them in the cache. The
    struck request is tried again without cached KV if it had used any, of decode or of prefill, and otherwise fails.
    """
    for prompt, is_warm, num_of_prefill in (
        (PROMPT, True, 0),
        (PROMPT, False, 5),
        (PROMPT, False, 0),
        (PROMPT[:1], False, 0),
    ):
        scripted = ScriptedEngine()
        serve(scripted, "elsewhere", OTHER, 4)
        if is_warm:
            serve(scripted, "before", prompt, 3)
        damage = Damage(scripted)
        failing = scripted.submit("failing", prompt, 8, cache_salt=SALT)
        scripted.step()
        scripted.hand_over("failing", num_cached=num_of_prefill)
        scripted.start()
        while len(failing.token_ids) < 4:
            scripted.step()
        damage.is_due = True
        while failing.error is None and "failing" not in scripted.handoffs:
            scripted.step()
            scripted.forward.run_all()
        if is_warm or num_of_prefill:
            assert failing.error is None, "it was not retried"
            retried = scripted.handoffs["failing"]
            assert (retried.num_held, retried.cache_salt) == (0, None), "it may fail for the same reason again"
        scripted.run()
        if is_warm or num_of_prefill:
            assert_right(failing)
            assert scripted.engine.load().num_row_retries == 1
        else:
            assert failing.error is not None, "the damage was not noticed"
        longer = (*prompt, *failing.token_ids)
        assert serve(scripted, "next", longer, 3) == 0, "damaged KV was used again"
        assert serve(scripted, "after that", longer, 3) == len(longer) - 1, "sound KV was not kept"
        assert serve(scripted, "elsewhere again", OTHER, 3) == len(OTHER) - 1, "other KV was forgotten too"


def test_one_that_holds_only_forgotten_kv_is_not_waited_for() -> None:
    """A request holds cached KV that was then found to be damaged, and only the KV of its last token is still to come.
    A new request with the same prompt does not wait for it.
    """
    scripted = ScriptedEngine()
    serve(scripted, "before", WAITING, 3)
    damage = Damage(scripted)
    scripted.submit("failing", WAITING, 8, cache_salt=SALT)
    scripted.start("failing")
    holder = scripted.submit("holder", WAITING, 3, cache_salt=SALT)
    scripted.step()
    assert scripted.handoffs["holder"].num_held == len(WAITING) - 1
    damage.is_due = True
    while scripted.outcomes["failing"].error is None and "failing" not in scripted.handoffs:
        scripted.step()
        scripted.forward.run_all()
    scripted.submit("next", WAITING, 3, cache_salt=SALT)
    scripted.step()
    assert scripted.handoffs["next"].num_held == 0
    scripted.run()
    assert_right(holder)


def test_kv_of_a_row_whose_length_was_wrong_is_forgotten() -> None:
    """A wrong length means that the device or a kernel is at fault, so none of the row's KV is trusted."""
    for prompt in (PROMPT, PROMPT[:1]):
        scripted = ScriptedEngine(max_kv_tokens=200, spec_info=CHAIN)
        with a_step_that_tells(lambda lengths: lengths + (1 << 40), number=3):
            failing = scripted.submit("failing", prompt, 24, cache_salt=SALT)
            scripted.run()
        assert failing.error is not None
        assert serve(scripted, "next", (*prompt, *failing.token_ids), 3) == 0


# ---- P8: endings and losses of others ---------------------------------------------------------------------------


@broken_by(prefixes.prefix_is_found_and_not_held, "decoded wrongly")
def check_what_is_held_outlives_its_owner() -> None:
    """A request holds KV that a second request, which still runs, has put into the cache. The second one is aborted or
    fails, and a third one takes all slots that become free.
    """
    for ending in ("abort", "fail"):
        scripted = ScriptedEngine(headroom_tokens=1, max_rows=3, max_kv_tokens=40)
        owner = scripted.submit("owner", PROMPT, 24, cache_salt=SALT)
        scripted.start("owner")
        heir = scripted.submit("heir", PROMPT, 20, cache_salt=SALT)
        scripted.step()
        assert scripted.handoffs["heir"].num_held == len(PROMPT) - 1, "nothing was held"
        if ending == "abort":
            scripted.abort("owner")
        else:
            scripted.model.fails_next = True
        hungry = scripted.submit("hungry", range(100, 112), 20, cache_salt=SALT)
        scripted.run()
        assert owner.has_ended and owner.finished is None, "the owner was to end early"
        assert_right(heir, hungry)


@broken_by(prefixes.a_retry_asks_for_what_the_first_attempt_did, "were held|request 0 failed")
@broken_by(prefixes.half_landed_kv_is_kept, "were held|decoded wrongly")
def check_a_lost_handoff_is_retried_with_what_is_held_then() -> None:
    """A handoff whose row holds a cached prefix breaks after its first segment. Before it is retried, the prefix stays,
    is evicted in part, or grows.
    """
    for then in ("nothing", "is evicted", "grows"):
        clock = Clock()
        scripted = ScriptedEngine(headroom_tokens=1, max_rows=2, max_kv_tokens=40, clock=clock)
        serve(scripted, "first", PROMPT[:6], 2)
        lost = scripted.submit("lost", (*PROMPT, 50, 51, 52), 8, cache_salt=SALT)
        scripted.step()
        handoff = scripted.handoffs["lost"]
        assert handoff.num_held == 6, "nothing was held"
        scripted.hand_over("lost")
        scripted.hold_back(3)  # all but the first segment
        failed = RowFailed(handoff.row, RowFailure.COMPUTE, True, 250, "planted")
        scripted.post(FrameArrived(handoff.call_id, failed))
        scripted.post(CallEnded(handoff.call_id, None))
        scripted.step()
        scripted.landing.run_all()
        if then == "grows":
            serve_beside(scripted, "longer", PROMPT, 2)
        elif then == "is evicted":
            serve_beside(scripted, "hungry", range(100, 120), 19, cache_salt=None)
            assert scripted.engine.load().prefixes.num_evicted > 0
        clock.now_s += 1.0
        scripted.step()
        num_held = scripted.handoffs["lost"].num_held
        assert num_held in {"nothing": [6], "is evicted": range(6), "grows": [8]}[then], f"{num_held} were held"
        scripted.run()
        assert_right(lost)


def serve_beside(
    scripted: ScriptedEngine, request_id: str, prompt: Sequence[int], max_tokens: int, **options: object
) -> None:
    """Runs a request to its end while another one waits, and checks its tokens."""
    outcome = scripted.submit(request_id, prompt, max_tokens, **{"cache_salt": SALT, **options})  # type: ignore
    scripted.step()
    scripted.hand_over(request_id)
    while not outcome.has_ended:
        scripted.step()
        scripted.landing.run_all()
    scripted.step()
    assert_right(outcome)


test_holds = holding(globals())
test_is_broken_by = breaking(globals())
