"""Tests of SmolLM2-135M in float32: the pair's greedy tokens equal transformers', in two configurations without Baton's
draft head (field rule A3) and two with it (B2).

Forwards over gRPC without the head use operators. In the other configurations all forwards that count are fused. This
is one file, so that one process computes the reference for all four. Alone, every second prompt
runs. `make parity` runs all of them, and a longer table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.client import AsyncClient
from baton.events import Completion, tokens_per_forward
from baton.full_speed import await_fused
from baton.local_pair import LocalPair
from common.model.loader import load_target
from common.sampling.params import ResolvedSampling
from tests.parity.reference import Reference
from tests.real.conftest import MAX_TOKENS, NEW_TOKENS, ONE_THREAD, SIZES, Prompts, check
from tests.support.drafted import Counts, Drafted
from tests.support.fused import assert_all_fused, forwards, fused
from tests.support.pair import MakePair, PairOptions
from tests.support.running_pair import HANDS_ALL_OVER

MIN_TOKENS_PER_FORWARD = 1.5
FUSED_BOUND_S = 180.0


@contextmanager
def all_fused(pair: LocalPair) -> Iterator[None]:
    """Waits until both services run fused kernels. All forwards within the block must then have been fused."""
    assert await_fused(pair.metrics_addresses, timeout_s=FUSED_BOUND_S)
    before = [forwards(address) for address in pair.metrics_addresses]
    yield
    for address, earlier in zip(pair.metrics_addresses, before, strict=True):
        assert_all_fused(forwards(address) - earlier, drafts=True)


@pytest.mark.timeout(600)
def test_in_one_process_sixteen_at_once_in_chunks_of_64_with_overlap(
    model_dir: Path, reference: Reference, prompts: Prompts, make_pair: MakePair
) -> None:
    model = load_target(model_dir, device="cpu", dtype="float32", fuses=True)
    sampling = ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, temperature=0.0, eos_token_ids=reference.eos_token_ids)
    with fused(model, max_tokens=MAX_TOKENS) as (decode, _), fused(model, max_tokens=MAX_TOKENS) as (prefill, _):
        pair = make_pair(decode, PairOptions(**SIZES), prefill_model=prefill)
        for name, ids in prompts:
            pair.submit(name, ids, sampling)
        pair.finish_prefill(bound_s=500)
        pair.run(bound_s=500)
    assert max(step.batch_size for step in pair.decode_steps) == 16
    check(reference, prompts, {name: outcome.token_ids for name, outcome in pair.outcomes.items()})


@pytest.mark.timeout(600)
def test_over_grpc_between_two_processes_alone_in_chunks_of_512_without_overlap(
    model_dir: Path, reference: Reference, prompts: Prompts, forked: Callable[..., LocalPair]
) -> None:
    async def run(address: str) -> dict[str, list[int]]:
        async with AsyncClient(address) as client:
            return {
                name: list((await client.complete(token_ids=ids, temperature=0.0, max_tokens=NEW_TOKENS)).token_ids)
                for name, ids in some
            }

    some = prompts[::2]
    with (
        forked(
            model=str(model_dir),
            dtype="float32",
            prefill_args=("--chunk-tokens=512", "--disabled-fast-paths=fused_forwards", *ONE_THREAD),
            decode_args=(HANDS_ALL_OVER, "--disabled-fast-paths=overlap,fused_forwards", *ONE_THREAD),
            exposes_metrics=True,
        ) as pair,
    ):
        outputs = asyncio.run(run(pair.decode_addresses[0]))
        for address in pair.metrics_addresses:
            assert forwards(address)["every target"] and not forwards(address)["fused target"]
    check(reference, some, outputs)


# ---- with drafts ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_a_tree_in_one_process_sixteen_at_once_with_overlap(
    drafted: Drafted, reference: Reference, prompts: Prompts, make_pair: MakePair
) -> None:
    options = PairOptions(draft_topk=4, num_draft_steps=3, num_draft_tokens=15, **SIZES)
    sampling = ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, temperature=0.0, eos_token_ids=reference.eos_token_ids)
    models = drafted.target, drafted.head
    with fused(*models, max_tokens=MAX_TOKENS) as decode, fused(*models, max_tokens=MAX_TOKENS) as prefill:
        pair = make_pair(decode[0], options, draft=decode[1], prefill_model=prefill[0], prefill_draft=prefill[1])
        for name, ids in prompts:
            pair.submit(name, ids, sampling)
        pair.finish_prefill(bound_s=500)
        pair.run(bound_s=500)
    assert max(step.batch_size for step in pair.decode_steps) == 16
    check(reference, prompts, {name: outcome.token_ids for name, outcome in pair.outcomes.items()})
    assert Counts.of(pair.outcomes.values()).tokens_per_step > MIN_TOKENS_PER_FORWARD


@pytest.mark.timeout(600)
def test_a_chain_over_grpc_alone_without_overlap(
    model_dir: Path, reference: Reference, prompts: Prompts, forked: Callable[..., LocalPair]
) -> None:
    async def run(address: str) -> dict[str, Completion]:
        async with AsyncClient(address) as client:
            return {
                name: await client.complete(token_ids=ids, temperature=0.0, max_tokens=NEW_TOKENS) for name, ids in some
            }

    some = prompts[::2]
    chain = ("--draft=demo", "--num-draft-tokens=4", "--no-adaptive-depth", "--disabled-fast-paths=overlap")
    with (
        forked(
            model=str(model_dir),
            dtype="float32",
            prefill_args=("--chunk-tokens=512", "--draft=demo", *ONE_THREAD),
            decode_args=(HANDS_ALL_OVER, *chain, *ONE_THREAD),
            exposes_metrics=True,
        ) as pair,
        all_fused(pair),
    ):
        completions = asyncio.run(run(pair.decode_addresses[0]))
    check(reference, some, {name: list(completion.token_ids) for name, completion in completions.items()})
    counts = [completion.speculation for completion in completions.values()]
    assert tokens_per_forward(count for count in counts if count is not None) > MIN_TOKENS_PER_FORWARD
