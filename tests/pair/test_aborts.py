"""Tests that when a client leaves, in any phase, its row and slots are free on both sides by the end of the step in
flight (field rule A5).
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from common.telemetry.stats import EngineLoad
from decode_service.messages import Abort
from decode_service.schedule.scheduler import DecodeEngine
from prefill_service.schedule.scheduler import PrefillEngine
from tests.support.drafted import Drafted
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


def step_until_empty(pair: InProcessPair, engine: DecodeEngine | PrefillEngine, *, at_most: int = 0) -> None:
    """Steps until the engine holds nothing. Raises AssertionError after more than `at_most` forwards."""
    num_steps = engine.load().num_steps
    pair.step_decode()
    pair.run(until=lambda: is_empty(engine.load()) or engine.load().num_steps > num_steps + at_most)
    assert is_empty(engine.load()), "still held after the forwards in flight"
    assert engine.load().num_steps <= num_steps + at_most


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
    step_until_empty(pair, pair.decode)
    step_until_empty(pair, pair.prefill, at_most=2 if overlap else 1)
    assert pair.prefill.load().num_steps < len(LONG_PROMPT) // 16 - 1, "the remaining chunks were not computed"


def test_abort_while_transferring(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), NARROW)
    pair.submit("left", LONG_PROMPT, SAMPLING)
    pair.run(until=lambda: is_transferring(pair))
    pair.abort("left")
    step_until_empty(pair, pair.decode)
    step_until_empty(pair, pair.prefill)
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
    step_until_empty(pair, pair.decode)
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


# ---- a storm --------------------------------------------------------------------------------------------------------

NUM_REQUESTS = 90


def arrivals() -> dict[str, tuple[list[int], ResolvedSampling]]:
    numbers = random.Random(29)
    return {
        str(number): (
            [numbers.randrange(4, 60) for _ in range(numbers.randrange(1, 40))],
            ResolvedSampling(seed=number, max_tokens=numbers.randrange(1, 20)),
        )
        for number in range(NUM_REQUESTS)
    }


def test_a_storm_of_aborts_leaves_everything_free_and_the_survivors_exact(
    make_pair: MakePair, leaning: Drafted
) -> None:
    """Freed rows and slots are reused at once, so a late write to them would show in other requests' tokens."""
    undisturbed = make_pair(leaning.target, PairOptions(context_tokens=64))
    for name, (prompt, sampling) in arrivals().items():
        undisturbed.submit(name, prompt, sampling)
    undisturbed.run()

    numbers = random.Random(31)
    pair = make_pair(
        leaning.target,
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
    for name, (prompt, sampling) in arrivals().items():
        pair.submit(name, prompt, sampling)
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
    assert num_aborted > 20
    assert len(pair.outcomes) >= NUM_REQUESTS - len(doomed)
    for name, outcome in pair.outcomes.items():
        assert outcome.error is None
        assert outcome.token_ids == undisturbed.outcomes[name].token_ids, name
