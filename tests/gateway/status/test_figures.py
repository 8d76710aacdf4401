"""Tests that the status page's figures are right for known counts at real endpoints."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator

import numpy as np
import pytest

from baton.server_info import InferenceLoad
from common.telemetry.stats import PrefixCounts, SpeculationStats, StepStats
from common.wire.handoff import KvSegment, PrebuiltBatch
from gateway.status.collector import Sampler
from gateway.status.figures import Histogram, merge
from tests.gateway.status.scene import LOAD, Clock, Decode, ExposedDecode, ExposedPrefill, sampler


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def pair(clock: Clock) -> AsyncIterator[tuple[Sampler, ExposedDecode, ExposedPrefill]]:
    with ExposedDecode() as decode, ExposedPrefill() as prefill:
        sampling = sampler(clock, [decode.address, prefill.address])
        yield sampling, decode, prefill
        await sampling.close()


async def test_rates_are_what_was_counted_over_the_time_that_passed(
    clock: Clock, pair: tuple[Sampler, ExposedDecode, ExposedPrefill]
) -> None:
    sampling, decode, prefill = pair
    decode.requests.output_tokens.inc(500)  # before anybody viewed the page
    await sampling.sample()
    decode.requests.output_tokens.inc(100)
    decode.requests.prompt_tokens.inc(40)
    decode.requests.handoff_bytes.inc(3000)
    for outcome in ("eos", "eos", "deadline"):
        decode.requests.requests.labels(outcome).inc()
    two = np.array([0, 1], np.int64)
    prefill.handoff.on_frames(
        [
            KvSegment(0, "target", 0, 1, 0, 1, b"x" * 4000),
            PrebuiltBatch(
                two, two, two, {"target": two}, np.array([0.25, 0.5]), np.array([1.0, 2.0]), 0 * two, (None, None)
            ),
        ]
    )
    prefill.engine.on_step(StepStats(batch_size=2, num_tokens=80, step_s=0.25))
    clock.now_s += 4
    await sampling.sample()

    seen = sampling.snapshot
    assert seen.window_s == 4
    assert seen.pair.output_tokens_per_s == 25
    assert seen.pair.prompt_tokens_per_s == 10
    assert seen.pair.requests_per_s == 0.75
    assert seen.pair.outcomes == {"deadline": 1, "eos": 2}
    assert (seen.pair.handoff_sent_bytes_per_s, seen.pair.handoff_received_bytes_per_s) == (1000, 750)
    assert [(rate.age_s, rate.tokens_per_s) for rate in seen.pair.token_rates] == [(0, 25)]
    assert [service.role for service in seen.services] == ["decode", "prefill"]
    of_prefill = seen.services[1].figures
    assert (of_prefill.prompt_tokens_per_s, of_prefill.batch_size_mean, of_prefill.step_mean_s) == (20, 2, 0.25)
    assert seen.pair.phases["prefill_replica_prefill"].num_observed == 2
    assert seen.pair.phases["prefill"].num_observed == 0


async def test_what_was_cached_is_a_share_of_what_rows_needed_since_the_last_sample(
    clock: Clock, pair: tuple[Sampler, ExposedDecode, ExposedPrefill]
) -> None:
    sampling, decode, prefill = pair
    decode.load = dataclasses.replace(decode.load, prefixes=PrefixCounts(1000, 1000, 1000), held_bytes=9000)
    await sampling.sample()
    assert sampling.snapshot.pair.decode_cached_share is None, "no row got its slots since"
    decode.load = dataclasses.replace(decode.load, prefixes=PrefixCounts(1400, 1100, 1020), held_bytes=9800)
    prefill.load = dataclasses.replace(prefill.load, prefixes=PrefixCounts(300, 225, 40))
    clock.now_s += 4
    await sampling.sample()

    seen = sampling.snapshot
    assert (seen.pair.decode_cached_share, seen.pair.prefill_cached_share) == (0.25, 0.75)
    assert seen.pair.handoff_held_bytes_per_s == 200
    of_decode, of_prefill = (service.figures for service in seen.services)
    assert (of_decode.cached_share, of_decode.evicted_tokens_per_s) == (0.25, 5)
    assert (of_prefill.cached_share, of_prefill.evicted_tokens_per_s) == (0.75, 10)
    assert (of_decode.handoff_held_bytes_per_s, of_prefill.handoff_held_bytes_per_s) == (200, None)


async def test_pools_and_queues_are_those_of_the_last_sample(
    clock: Clock, pair: tuple[Sampler, ExposedDecode, ExposedPrefill]
) -> None:
    sampling, _, exposed_prefill = pair
    exposed_prefill.is_ready = False
    await sampling.sample()

    decode, prefill = sampling.snapshot.services
    assert (decode.is_ready, prefill.is_ready) == (True, False)
    assert decode.rows is not None
    rows = decode.rows
    assert (rows.free, rows.reserved, rows.transferring, rows.running, rows.quarantined) == (4, 1, 1, 1, 1)
    assert decode.kv_slots is not None
    assert (decode.kv_slots.free, decode.kv_slots.running) == (60, 4)
    assert (decode.num_queued, decode.num_running, prefill.unsent_kv_bytes) == (5, 1, 11)
    assert decode.figures.output_tokens_per_s is None, "one sample has no rate"
    assert decode.figures.phases["queue"].p50_s is None


async def test_quantiles_are_interpolated_within_their_bucket_and_over_services(clock: Clock) -> None:
    with ExposedDecode() as first, ExposedDecode() as second:
        sampling = sampler(clock, [first.address, second.address])
        first.requests.phases["queue"].observe(30)  # before the window
        await sampling.sample()
        for _ in range(50):
            first.requests.phases["queue"].observe(0.2)  # in 0.1 to 0.25
            second.requests.phases["queue"].observe(0.4)  # in 0.25 to 0.5
        clock.now_s += 2
        await sampling.sample()
        queue = sampling.snapshot.pair.phases["queue"]
        await sampling.close()

    assert queue.num_observed == 100
    assert queue.p50_s == pytest.approx(0.25)
    assert queue.p99_s == pytest.approx(0.25 + 0.25 * 49 / 50)


def test_what_lies_above_the_last_bound_is_that_bound() -> None:
    assert Histogram(((1.0, 0), (float("inf"), 5)), 50).quantile(0.5) == 1
    assert merge([]).quantile(0.5) is None


async def test_acceptance_is_of_drafts_and_by_position(
    clock: Clock, pair: tuple[Sampler, ExposedDecode, ExposedPrefill]
) -> None:
    sampling, decode, _ = pair
    await sampling.sample()
    assert sampling.snapshot.pair.acceptance is None
    decode.speculation.on_step(StepStats(1, 4, 0.1, SpeculationStats(4, (3,), 0.01, 0.01, 0.01)))
    clock.now_s += 2
    await sampling.sample()
    running = sampling.snapshot.pair.acceptance
    assert running is not None
    assert (running.acceptance, running.accept_length) == (None, 3), "drafts count when their request ends"

    decode.requests.drafted_tokens.inc(40)
    decode.requests.accepted_tokens.inc(10)
    for position, accepted in (("1", 8), ("2", 2), ("10", 0)):
        decode.requests.drafted_at.labels(position).inc(20)
        decode.requests.accepted_at.labels(position).inc(accepted)
    decode.speculation.on_step(StepStats(2, 8, 0.1, SpeculationStats(4, (2, 5, 4), 0.01, 0.01, 0.01)))
    clock.now_s += 2
    await sampling.sample()

    acceptance = sampling.snapshot.pair.acceptance
    assert acceptance is not None
    assert (acceptance.acceptance, acceptance.accept_length) == (0.25, 3.5)
    assert acceptance.by_position == (0.4, 0.1, 0)


async def test_what_is_older_than_the_window_is_forgotten(
    clock: Clock, pair: tuple[Sampler, ExposedDecode, ExposedPrefill]
) -> None:
    sampling, decode, _ = pair
    await sampling.sample()
    decode.requests.output_tokens.inc(100)
    for _ in range(3):
        clock.now_s += 29
        await sampling.sample()

    seen = sampling.snapshot
    assert seen.window_s == 58
    assert seen.pair.output_tokens_per_s == 0


async def test_figures_are_made_once_a_round_and_only_their_age_moves_until_the_next_is_whole(clock: Clock) -> None:
    is_asked, may_answer = asyncio.Event(), asyncio.Event()
    may_answer.set()

    class Slow(Decode):
        async def load(self) -> InferenceLoad:
            is_asked.set()
            await may_answer.wait()
            return await super().load()

    client = Slow(LOAD)
    sampling = sampler(clock, [], ["10.0.0.1:50051"], open_client=lambda address: client)
    assert json.loads(sampling.document())["age_s"] is None
    await sampling.sample()
    whole = json.loads(sampling.document())
    assert (whole["age_s"], whole["decode"][0]["num_running"]) == (0, LOAD.num_running)

    is_asked.clear()
    may_answer.clear()
    clock.now_s += 2
    under_way = asyncio.create_task(sampling.sample())
    await is_asked.wait()
    clock.now_s += 1
    assert json.loads(sampling.document()) == {**whole, "age_s": 3}

    client.answer = dataclasses.replace(LOAD, num_running=5)
    may_answer.set()
    await under_way
    later = json.loads(sampling.document())
    assert (later["age_s"], later["decode"][0]["num_running"]) == (1, 5)
    await sampling.close()


async def test_while_the_first_round_lasts_who_has_answered_is_shown_and_who_has_not_is_named(clock: Clock) -> None:
    has_asked, may_answer = asyncio.Event(), asyncio.Event()

    class Slow(Decode):
        async def load(self) -> InferenceLoad:
            has_asked.set()
            await may_answer.wait()
            return await super().load()

    clients = {"10.0.0.1:50051": Decode(LOAD), "10.0.0.2:50051": Slow(LOAD)}
    sampling = sampler(clock, [], list(clients), open_client=lambda address: clients[address.numeric])
    assert json.loads(sampling.document())["awaited"] == list(clients)
    under_way = asyncio.create_task(sampling.sample())
    await has_asked.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    early = json.loads(sampling.document())
    assert (early["age_s"], early["awaited"]) == (None, ["10.0.0.2:50051"])
    assert [decode["is_reachable"] for decode in early["decode"]] == [True, False]

    may_answer.set()
    await under_way
    whole = json.loads(sampling.document())
    assert (whole["awaited"], [decode["is_reachable"] for decode in whole["decode"]]) == ([], [True, True])
    await sampling.close()


async def test_without_metrics_targets_a_round_is_whole_all_the_same() -> None:
    sampling = sampler(Clock(), [], ["10.0.0.1:50051"])
    await sampling.sample()
    seen = json.loads(sampling.document())
    assert (seen["age_s"], seen["services"], len(seen["decode"])) == (0, [], 1)
    await sampling.close()
