"""SmolLM2-135M in float32: the pair's greedy tokens are transformers' own, in two configurations (A3).

`make parity` runs the longer table.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.client import AsyncClient
from baton.local_pair import LocalPair
from common.model.loader import load_target
from common.model.sampling_params import ResolvedSampling
from tests.conftest import MakePair
from tests.parity.reference import Reference
from tests.real.conftest import NEW_TOKENS, ONE_THREAD, Prompts, check
from tests.support.pair import PairOptions


@pytest.mark.timeout(600)
def test_in_one_process_sixteen_at_once_in_chunks_of_64_with_overlap(
    model_dir: Path, reference: Reference, prompts: Prompts, make_pair: MakePair
) -> None:
    model = load_target(model_dir, device="cpu", dtype="float32")
    pair = make_pair(
        model,
        PairOptions(
            chunk_tokens=64,
            max_batch_tokens=512,
            context_tokens=2048,
            prefill_tokens=8192,
            decode_tokens=12288,
            max_segment_bytes=4 << 20,
            send_budget_bytes=32 << 20,
            receive_budget_bytes=32 << 20,
        ),
    )
    sampling = ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, temperature=0.0, eos_token_ids=reference.eos_token_ids)
    for name, ids in prompts:
        pair.submit(name, ids, sampling)
    pair.run(bound_s=500)
    assert max(step.batch_size for step in pair.decode_steps) == 16
    check(reference, prompts, {name: outcome.token_ids for name, outcome in pair.outcomes.items()})


@pytest.mark.timeout(600)
def test_over_grpc_between_two_processes_alone_in_chunks_of_512_without_overlap(
    model_dir: Path, reference: Reference, prompts: Prompts
) -> None:
    async def run(address: str) -> dict[str, list[int]]:
        async with AsyncClient(address) as client:
            return {
                name: list((await client.complete(token_ids=ids, temperature=0.0, max_tokens=NEW_TOKENS)).token_ids)
                for name, ids in prompts
            }

    with LocalPair(
        model=str(model_dir),
        dtype="float32",
        prefill_args=("--chunk-tokens=512", *ONE_THREAD),
        decode_args=("--no-overlap", *ONE_THREAD),
    ) as pair:
        outputs = asyncio.run(run(pair.decode_addresses[0]))
    check(reference, prompts, outputs)
