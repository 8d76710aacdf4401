"""Prompts that the decode service computes itself: their tokens are those of a handoff, and beside the running rows at
most one forward of bounded size runs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from common.device.scripted import ScriptedDevice, pick_with
from common.prompts.chunk_batch import ChunkBatch
from common.prompts.worker import LaunchedChunks, PromptWorker
from common.sampling.state import SamplingState
from decode_service.messages import Phase, Replica, ReplicasChanged
from decode_service.schedule import dispatcher
from decode_service.schedule.local_prefill import LocalPrefill
from decode_service.schedule.request import Request
from decode_service.speculate.spec_info import SpecInfo
from tests.engine.harness import REPLICA, Outcome, ScriptedEngine
from tests.engine.mutants import local_prefill
from tests.engine.mutants.kinds import Check, Mutant, name_of, see_it_fail
from tests.engine.speculating import CHAIN, TREE, run_one_each

LIMIT = 8
SHAPES = {"plain": None, "chain": CHAIN, "tree": TREE}
NO_REPLICA = ReplicasChanged((Replica(REPLICA, False),))
"""Where prefill could compute nothing."""


class NotedChunks:
    """The numbers of tokens of all forwards of chunks since it was made."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_tokens: list[int] = []
        forward = PromptWorker.forward

        def noting(worker: PromptWorker, batch: ChunkBatch[Any], *arguments: Any, **options: Any) -> LaunchedChunks:
            self.num_tokens.append(batch.num_tokens)
            return forward(worker, batch, *arguments, **options)

        patch.setattr(PromptWorker, "forward", noting)


def assert_right(outcomes: Sequence[Outcome]) -> None:
    for number, outcome in enumerate(outcomes):
        assert outcome.is_abandoned or outcome.finished is not None, f"request {number}: {outcome.error}"
        expected = outcome.expected
        assert outcome.token_ids == (expected[: len(outcome.token_ids)] if outcome.is_abandoned else expected), (
            f"request {number} was decoded wrongly"
        )


def alone(**options: Any) -> ScriptedEngine:
    """A decode engine without a replica, for which no time passes."""
    return ScriptedEngine(local_prefill_tokens=LIMIT, replicas=NO_REPLICA, clock=lambda: 0.0, **options)


def check_short_prompts_need_no_replica() -> None:
    for spec_info in SHAPES.values():
        for overlap in (True, False):
            scripted = alone(spec_info=spec_info, overlap=overlap)
            outcomes = [
                scripted.submit(str(length), range(1, length + 1), 7, temperature=float(length % 2), seed=length)
                for length in range(1, LIMIT + 1)
            ]
            scripted.run()
            assert_right(outcomes)
            assert all(outcome.finished and not outcome.finished.timings.kv_bytes for outcome in outcomes)


def check_what_is_cached_counts_as_computed() -> None:
    """A conversation whose turns are short stays here, however long it gets."""
    for spec_info in SHAPES.values():
        scripted = alone(spec_info=spec_info)
        prompt = [5, 6, 7, 8, 9]
        for turn in range(5):
            outcome = scripted.submit(str(turn), prompt, 6, cache_salt="")
            scripted.run()
            assert_right([outcome])
            prompt = [*prompt, *outcome.token_ids, 20 + turn, 30 + turn]
        assert scripted.engine.load().prefixes.num_found > 4 * LIMIT


def check_a_chunk_is_bounded() -> None:
    """Also while several prompts wait: what exceeds the limit is handed off."""
    with pytest.MonkeyPatch.context() as patch:
        noted = NotedChunks(patch)
        scripted = ScriptedEngine(max_rows=8, local_prefill_tokens=LIMIT)
        outcomes = [scripted.submit(str(number), range(1, 6), 12, seed=number) for number in range(6)]
        scripted.step()
        assert len(scripted.handoffs) == 5, "a burst of prompts was computed here"
        scripted.run()
        assert_right(outcomes)
        assert noted.num_tokens and max(noted.num_tokens) <= LIMIT


def check_a_chunk_in_flight_holds_its_row() -> None:
    """The request leaves while its chunk has not run, and another one wants its row."""
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
    assert_right([runner, hungry])


def check_any_order_gives_the_same_tokens() -> None:
    """Short and long prompts, aborts and retractions, however the streams run."""
    num_local = num_retracted = 0
    for seed in range(12):
        numbers = random.Random(seed)
        device = ScriptedDevice(on_synchronize=pick_with(numbers.choice))
        spec_info: SpecInfo | None = numbers.choice(list(SHAPES.values()))
        scripted = ScriptedEngine(
            device=device,
            max_rows=4,
            max_kv_tokens=80,
            overlap=numbers.random() < 0.7,
            spec_info=spec_info,
            local_prefill_tokens=LIMIT,
        )
        outcomes = []
        for arrival in range(12):
            prompt = [numbers.randrange(1, 900) for _ in range(numbers.randint(1, 14))]
            outcomes.append(
                scripted.submit(
                    str(arrival),
                    prompt,
                    numbers.choice([1, 2, 6, 20, 30]),
                    temperature=numbers.choice([0.0, 1.0]),
                    seed=arrival,
                    cache_salt=numbers.choice([None, ""]),
                )
            )
            for _ in range(numbers.randint(0, 4)):
                scripted.step()
                for waiting in list(scripted.handoffs):
                    if numbers.random() < 0.7:
                        scripted.hand_over(waiting)
            if numbers.random() < 0.3:
                scripted.abort(str(numbers.randint(0, arrival)))
        scripted.run(advance=run_one_each)
        assert_right(outcomes)
        ended = [outcome.finished.timings for outcome in outcomes if outcome.finished]
        num_local += sum(not timings.num_handoff_attempts for timings in ended)
        num_retracted += scripted.engine.load().num_retractions
    assert num_local > 20, "hardly a prompt was computed here"
    assert num_retracted, "slots were never short"


def check_a_failed_chunk_is_computed_again() -> None:
    with pytest.MonkeyPatch.context() as patch:
        fails = iter([True])
        reset = SamplingState.reset

        def failing(state: SamplingState, seeds: Sequence[Any]) -> None:
            if next(fails, False):
                raise RuntimeError("planted")
            reset(state, seeds)

        patch.setattr(SamplingState, "reset", failing)
        scripted = alone()
        outcome = scripted.submit("r", range(1, 8), 4, cache_salt="")
        scripted.run()
        assert_right([outcome])
        load = scripted.engine.load()
        assert (load.num_row_retries, load.prefixes.num_found) == (1, 0), "a failed chunk's KV was kept"


def check_a_chunk_that_always_fails_fails_its_request() -> None:
    with pytest.MonkeyPatch.context() as patch:

        def failing(state: SamplingState, seeds: Sequence[Any]) -> None:
            raise RuntimeError("planted")

        patch.setattr(SamplingState, "reset", failing)
        scripted = alone()
        outcome = scripted.submit("r", range(1, 8), 4)
        scripted.run()
        assert str(outcome.error) == "a prefill step failed: planted"


def check_damaged_kv_fails_its_request_and_is_forgotten() -> None:
    with pytest.MonkeyPatch.context() as patch:
        scripted = alone()
        seen = scripted.submit("sound", [1, 2, 3, 4], 2, cache_salt="")
        scripted.run()
        collect = LocalPrefill._first_tokens

        def damaged(local: LocalPrefill, launched: Any) -> Any:
            with torch.inference_mode():
                launched.computed.get().sampled.is_invalid.fill_(True)
            return collect(local, launched)

        patch.setattr(LocalPrefill, "_first_tokens", damaged)
        struck = scripted.submit("struck", [1, 2, 3, 4, 5], 2, cache_salt="")
        scripted.run()
        patch.undo()
        assert_right([seen])
        assert str(struck.error) == "the model produced no finite logit"
        found = scripted.engine.load().prefixes.num_found
        again = scripted.submit("again", [1, 2, 3, 4, 5], 2, cache_salt="")
        scripted.run()
        assert_right([again])
        assert scripted.engine.load().prefixes.num_found == found, "damaged KV was used again"


def check_retracted_requests_come_back() -> None:
    """Requests that were computed here give their slots to older ones, and come back by a handoff: they are longer."""
    with mock.patch.object(dispatcher, "_HEADROOM_TOKENS", 1):
        scripted = ScriptedEngine(max_rows=3, max_kv_tokens=30, local_prefill_tokens=LIMIT)
        outcomes = [scripted.submit(str(number), range(1, 7), 20, seed=number) for number in range(3)]
        scripted.run()
    assert_right(outcomes)
    assert scripted.engine.load().num_retractions > 0


def check_a_long_prompt_holds_up_no_short_one() -> None:
    """Nobody can compute the long one now."""
    scripted = alone()
    long = scripted.submit("long", range(1, 30), 2)
    short = scripted.submit("short", [1, 2, 3], 3)
    for _ in range(12):
        scripted.step()
        scripted.forward.run_all()
    assert_right([short])
    assert not long.has_ended
    assert scripted.engine.load().num_queued == 1


def check_a_failed_prompt_keeps_its_turn() -> None:
    """Two prompts of one client, of which only one fits here at a time. The older one's first chunk fails."""
    started: list[str] = []
    begin = LocalPrefill.begin

    def noting(local: LocalPrefill, req: Request) -> None:
        started.append(req.request_id)
        begin(local, req)

    with (
        mock.patch.object(SamplingState, "reset", side_effect=[RuntimeError("planted"), *[None] * 9]),
        mock.patch.object(LocalPrefill, "begin", noting),
    ):
        scripted = alone(max_rows=1)
        scripted.submit("old", [1, 2, 3, 4, 5], 1)
        scripted.submit("young", [1, 2, 3, 4, 6], 1)
        scripted.run()
    assert started == ["old", "old", "young"]


CHECKS: list[Check] = [
    check_a_long_prompt_holds_up_no_short_one,
    check_a_failed_prompt_keeps_its_turn,
    check_short_prompts_need_no_replica,
    check_what_is_cached_counts_as_computed,
    check_a_chunk_in_flight_holds_its_row,
    check_any_order_gives_the_same_tokens,
    check_retracted_requests_come_back,
    check_a_chunk_is_bounded,
    check_a_failed_chunk_is_computed_again,
    check_a_chunk_that_always_fails_fails_its_request,
    check_damaged_kv_fails_its_request_and_is_forgotten,
]


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_holds(check: Check) -> None:
    check()


@pytest.mark.parametrize(
    ("check", "mutant", "message"),
    [
        (check_any_order_gives_the_same_tokens, local_prefill.row_is_not_seeded, "decoded wrongly"),
        (check_what_is_cached_counts_as_computed, local_prefill.cached_tokens_are_left_to_compute, "not over"),
        (check_a_chunk_is_bounded, local_prefill.prompts_all_stay, "a burst of prompts"),
        (check_a_chunk_in_flight_holds_its_row, local_prefill.chunk_holds_no_row, "reused under a chunk"),
        (check_a_failed_chunk_is_computed_again, local_prefill.unwritten_kv_is_kept, "decoded wrongly|KV was kept"),
    ],
    ids=name_of,
)
def test_is_broken_by(check: Check, mutant: Mutant, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    see_it_fail(check, mutant, message, monkeypatch)
