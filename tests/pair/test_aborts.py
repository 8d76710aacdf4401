"""Tests that when a client leaves, in any phase, its row and slots are free on both sides by the end of the step in
flight (field rule A5).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from common.load import EngineLoad
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from decode_service.messages import Abort
from tests.support.pair import InProcessPair, MakePair, PairOptions

LONG_PROMPT = [20 + token % 200 for token in range(7, 7 + 3 * 160, 3)]
SHORT_PROMPT = [40, 90, 140]
SAMPLING = ResolvedSampling(seed=5, max_tokens=24)
NARROW = PairOptions(
    chunk_tokens=16, max_batch_tokens=32, max_segment_bytes=2048, send_budget_bytes=2048, receive_budget_bytes=2048
)
"""Options under which KV travels one segment of 4 tokens at a time, so that a long prompt spends many steps in each
phase.
"""
ROOMY = PairOptions(chunk_tokens=16, max_batch_tokens=32)

Tiny = Callable[[str], TargetModel]


def is_empty(load: EngineLoad) -> bool:
    return (load.rows.held, load.slots.held) == (0, 0) and load.num_queued == 0


def is_transferring(pair: InProcessPair) -> bool:
    return (pair.decode.load().rows.transferring, pair.prefill.load().rows.transferring) == (1, 1)


def step_decode_until_empty(pair: InProcessPair, *, at_most: int) -> None:
    """Steps decode until it holds nothing. Raises AssertionError after more than `at_most` forwards."""
    num_steps = pair.decode.load().num_steps
    pair.step_decode()
    pair.run(until=lambda: is_empty(pair.decode.load()) or pair.decode.load().num_steps > num_steps + at_most)
    assert is_empty(pair.decode.load()), "still held after the step in flight"
    assert pair.decode.load().num_steps <= num_steps + at_most


def step_prefill_until_empty(pair: InProcessPair, *, at_most: int) -> None:
    """Steps until prefill holds nothing. Raises AssertionError after more than `at_most` finished forwards."""
    num_steps = pair.prefill.load().num_steps
    pair.run(until=lambda: is_empty(pair.prefill.load()) or pair.prefill.load().num_steps > num_steps + at_most)
    assert is_empty(pair.prefill.load()), "still held after the forwards in flight"
    assert pair.prefill.load().num_steps <= num_steps + at_most


# ---- one request, in each phase -------------------------------------------------------------------------------------


def test_abort_before_the_first_step(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"))
    pair.submit("left", LONG_PROMPT, SAMPLING)
    assert not pair.abort("left").token_ids
    pair.step()
    assert is_empty(pair.decode.load()) and is_empty(pair.prefill.load())


def test_abort_while_queued_for_a_row(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(decode_rows=1))
    first = pair.submit("first", SHORT_PROMPT, SAMPLING)
    pair.submit("left", LONG_PROMPT, SAMPLING)
    pair.run(until=lambda: len(first.token_ids) >= 2)
    assert pair.decode.load().num_queued == 1
    pair.abort("left")
    pair.step_decode()
    assert pair.decode.load().num_queued == 0
    num_prefill_steps = pair.prefill.load().num_steps
    pair.run()
    assert pair.prefill.load().num_steps == num_prefill_steps, "it was never handed off"


def test_abort_while_queued_at_the_prefill_service(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(prefill_rows=1, chunk_tokens=16, max_batch_tokens=16))
    pair.submit("first", LONG_PROMPT, SAMPLING)
    pair.submit("left", LONG_PROMPT, SAMPLING)
    pair.run(until=lambda: pair.prefill.load().num_queued == 1)
    pair.abort("left")
    pair.step_decode()
    assert pair.decode.load().rows.free == pair.decode.load().rows.total - 1, "nothing was landing: free at once"
    pair.step_prefill()
    assert pair.prefill.load().num_queued == 0


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_abort_between_chunks(overlap: bool, make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(chunk_tokens=16, max_batch_tokens=16, overlap=overlap))
    pair.submit("left", LONG_PROMPT, SAMPLING)
    pair.run(until=lambda: pair.prefill.load().num_steps >= 2)
    assert pair.prefill.load().num_running == 1, "chunks are left"
    pair.abort("left")
    step_decode_until_empty(pair, at_most=0)
    step_prefill_until_empty(pair, at_most=2 if overlap else 1)
    assert pair.prefill.load().num_steps < len(LONG_PROMPT) // 16 - 1, "the remaining chunks were not computed"


def test_abort_while_transferring(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), NARROW)
    pair.submit("left", LONG_PROMPT, SAMPLING)
    pair.run(until=lambda: is_transferring(pair))
    pair.abort("left")
    step_decode_until_empty(pair, at_most=0)
    step_prefill_until_empty(pair, at_most=0)
    pair.settle()  # the segment that was being copied also gives its part of the send budget back
    assert pair.decode_steps == []


def test_abort_of_what_landed_and_did_not_run_yet(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), ROOMY)
    pair.submit("left", LONG_PROMPT, SAMPLING)
    pair.step_decode()
    pair.step_prefill()
    while not is_empty(pair.prefill.load()):
        pair.step_prefill()
    pair.abort("left")  # after the row's last frame
    step_decode_until_empty(pair, at_most=0)
    assert pair.decode_steps == []


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_abort_while_decoding(overlap: bool, make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(overlap=overlap))
    outcome = pair.submit("left", SHORT_PROMPT, SAMPLING)
    pair.run(until=lambda: len(outcome.token_ids) >= 3)
    assert pair.decode.load().rows.running == 1
    pair.abort("left")
    pair.step_decode()
    assert is_empty(pair.decode.load()), "freed in the very step that took the command"
    assert len(outcome.token_ids) < SAMPLING.max_tokens


def test_abort_of_a_retracted_request(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(decode_tokens=64))
    for name in ("older", "left"):
        pair.submit(name, SHORT_PROMPT, ResolvedSampling(seed=1, max_tokens=48))
    pair.run(until=lambda: pair.decode.load().num_retractions == 1)
    pair.abort("left")
    pair.step_decode()
    pair.step_decode()
    load = pair.decode.load()
    assert (load.num_queued, load.rows.total - load.rows.free) == (0, 1), "only the older request holds a row"
    pair.run()


def test_an_unknown_or_ended_request_cannot_be_aborted(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"))
    outcome = pair.submit("done", SHORT_PROMPT, SAMPLING)
    pair.run()
    pair.post(Abort("done"))
    pair.post(Abort("never seen"))
    pair.step()
    assert len(outcome.token_ids) == SAMPLING.max_tokens


# ---- other requests -------------------------------------------------------------------------------------------------

PHASES: dict[str, Callable[[InProcessPair], bool]] = {
    "prefilling": lambda pair: pair.prefill.load().num_running > 0,
    "transferring": lambda pair: pair.decode.load().rows.transferring > 0 and pair.prefill.load().rows.transferring > 0,
    "decoding": lambda pair: len(pair.outcomes["left"].token_ids) >= 2,
}


@pytest.mark.parametrize("phase", PHASES)
def test_other_requests_keep_their_tokens(phase: str, make_pair: MakePair, tiny_target: Tiny) -> None:
    """The freed row and slots are reused at once, so a late write to them would show in the other requests' tokens."""

    def submit_others(pair: InProcessPair, names: str) -> None:
        for number, name in enumerate(names):
            prompt = LONG_PROMPT[number : 20 + 13 * number]
            pair.submit(name, prompt, ResolvedSampling(seed=ord(name), max_tokens=24))

    undisturbed = make_pair(tiny_target("llama"), PairOptions())
    submit_others(undisturbed, "abcd")
    undisturbed.run()

    narrow = PairOptions(
        decode_rows=3, decode_tokens=420, prefill_rows=3, prefill_tokens=420, chunk_tokens=16, max_batch_tokens=48,
        max_segment_bytes=2048, send_budget_bytes=4096, receive_budget_bytes=4096,
    )  # fmt: skip
    pair = make_pair(tiny_target("llama"), narrow)
    pair.submit("left", LONG_PROMPT, SAMPLING)
    submit_others(pair, "abcd")
    pair.run(until=lambda: PHASES[phase](pair))
    pair.abort("left")
    pair.run()
    for name, outcome in pair.outcomes.items():
        assert outcome.token_ids == undisturbed.outcomes[name].token_ids, name


# ---- a storm --------------------------------------------------------------------------------------------------------

NUM_REQUESTS = 300


@dataclass(frozen=True, slots=True)
class Arrival:
    prompt: list[int]
    sampling: ResolvedSampling


def arrivals() -> dict[str, Arrival]:
    numbers = random.Random(29)
    return {
        str(number): Arrival(
            [numbers.randrange(4, 60) for _ in range(numbers.randrange(1, 40))],
            ResolvedSampling(seed=number, max_tokens=numbers.randrange(1, 20)),
        )
        for number in range(NUM_REQUESTS)
    }


def test_a_storm_of_aborts_leaves_everything_free_and_the_survivors_exact(
    make_pair: MakePair, last_token_target: TargetModel
) -> None:
    undisturbed = make_pair(last_token_target, PairOptions(context_tokens=64))
    for name, arrival in arrivals().items():
        undisturbed.submit(name, arrival.prompt, arrival.sampling)
    undisturbed.run()

    numbers = random.Random(31)
    pair = make_pair(
        last_token_target,
        PairOptions(
            context_tokens=64,
            decode_rows=12,
            decode_tokens=256,
            prefill_rows=6,
            prefill_tokens=160,
            chunk_tokens=8,
            max_batch_tokens=32,
            max_segment_bytes=1024,
            send_budget_bytes=4096,
            receive_budget_bytes=4096,
        ),
    )
    doomed = {name for name in arrivals() if numbers.random() < 0.5}
    leaves_after: dict[str, int] = {}
    num_aborted = 0
    for name, arrival in arrivals().items():
        pair.submit(name, arrival.prompt, arrival.sampling)
        if name in doomed:
            leaves_after[name] = numbers.randrange(60)
        for _ in range(numbers.randrange(4)):
            pair.step()
            for other in [other for other, num_steps in leaves_after.items() if num_steps == 0]:
                if not pair.outcomes[other].has_ended:
                    pair.abort(other)
                    num_aborted += 1
            leaves_after = {other: num_steps - 1 for other, num_steps in leaves_after.items() if num_steps}
    pair.run()
    pair.settle()
    assert is_empty(pair.decode.load()) and is_empty(pair.prefill.load())
    assert num_aborted > 50
    assert len(pair.outcomes) >= NUM_REQUESTS - len(doomed)
    for name, outcome in pair.outcomes.items():
        assert outcome.error is None
        assert outcome.token_ids == undisturbed.outcomes[name].token_ids, name
