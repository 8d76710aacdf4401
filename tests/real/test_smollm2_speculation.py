"""SmolLM2 with the head that comes with Baton: greedy tokens are `generate`'s, sampled ones those without drafts.

Float32, so that a wider forward of the target cannot turn a choice. `make parity` runs the longer table.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncClient
from baton.events import Completion, tokens_per_forward
from baton.local_pair import LocalPair
from common.draft_source import resolve_draft
from common.model.sampling_params import ResolvedSampling
from tests.conftest import MakePair
from tests.parity.reference import Reference
from tests.real.conftest import NEW_TOKENS, ONE_THREAD, Prompts, check
from tests.support.drafted import Counts, Drafted, assert_same, load_drafted
from tests.support.pair import InProcessPair, PairOptions

MIN_TOKENS_PER_FORWARD = 1.5
NUM_SAMPLED = 20
SIZES: dict[str, Any] = {
    "chunk_tokens": 64,
    "max_batch_tokens": 512,
    "context_tokens": 2048,
    "prefill_tokens": 8192,
    "decode_tokens": 12288,
    "max_segment_bytes": 4 << 20,
    "send_budget_bytes": 32 << 20,
    "receive_budget_bytes": 32 << 20,
}


@pytest.fixture(scope="module")
def drafted(model_dir: Path) -> Drafted:
    return load_drafted(model_dir, resolve_draft("demo"))


@pytest.mark.timeout(600)
def test_a_tree_in_one_process_sixteen_at_once_with_overlap(
    drafted: Drafted, reference: Reference, prompts: Prompts, make_pair: MakePair
) -> None:
    options = PairOptions(draft_topk=4, num_draft_steps=3, num_draft_tokens=15, **SIZES)
    pair = make_pair(drafted.target, options, draft=drafted.head)
    sampling = ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, temperature=0.0, eos_token_ids=reference.eos_token_ids)
    for name, ids in prompts:
        pair.submit(name, ids, sampling)
    pair.run(bound_s=500)
    assert max(step.batch_size for step in pair.decode_steps) == 16
    check(reference, prompts, {name: outcome.token_ids for name, outcome in pair.outcomes.items()})
    assert Counts.of(pair.outcomes.values()).tokens_per_step > MIN_TOKENS_PER_FORWARD


@pytest.mark.timeout(600)
def test_a_chain_over_grpc_alone_without_overlap(model_dir: Path, reference: Reference, prompts: Prompts) -> None:
    async def run(address: str) -> dict[str, Completion]:
        async with AsyncClient(address) as client:
            return {
                name: await client.complete(token_ids=ids, temperature=0.0, max_tokens=NEW_TOKENS)
                for name, ids in prompts
            }

    chain = ("--draft=demo", "--num-draft-tokens=4", "--no-adaptive-depth", "--no-overlap")
    with LocalPair(
        model=str(model_dir),
        dtype="float32",
        prefill_args=("--chunk-tokens=512", "--draft=demo", *ONE_THREAD),
        decode_args=(*chain, *ONE_THREAD),
    ) as pair:
        completions = asyncio.run(run(pair.decode_addresses[0]))
    check(reference, prompts, {name: list(completion.token_ids) for name, completion in completions.items()})
    counts = [completion.speculation for completion in completions.values()]
    assert tokens_per_forward(count for count in counts if count is not None) > MIN_TOKENS_PER_FORWARD


@pytest.mark.timeout(600)
def test_a_seed_gives_the_same_output_with_and_without_drafts(
    drafted: Drafted, prompts: Prompts, make_pair: MakePair
) -> None:
    short = [ids for name, ids in prompts if not name.startswith("long")]
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.2},
        {"temperature": 1.0, "num_logprobs": 2},
    )

    def run(pair: InProcessPair) -> InProcessPair:
        for number in range(NUM_SAMPLED):
            sampling = ResolvedSampling(seed=number, max_tokens=32, **kinds[number % len(kinds)])
            pair.submit(str(number), short[number % len(short)], sampling)
        pair.run(bound_s=300)
        return pair

    plain = run(make_pair(drafted.target, PairOptions(**SIZES)))
    trees = PairOptions(draft_topk=3, num_draft_steps=3, num_draft_tokens=9, **SIZES)
    for options in (PairOptions(num_draft_tokens=4, **SIZES), trees):
        pair = run(make_pair(drafted.target, options, draft=drafted.head))
        for name, expected in plain.outcomes.items():
            assert_same(pair.outcomes[name], expected)
        counts = Counts.of(pair.outcomes.values())
        print(f"{options.spec_info}: {counts.num_accepted} drafts accepted, {counts.num_rejected} not")
        assert counts.num_accepted > 50 and counts.num_rejected > 50
