"""Tests of SmolLM2-135M in float32: the pair's greedy tokens equal transformers' (field rules A3 and B2).

The gate compares short outputs with tokens that are kept here. The other tests compare every prompt's with `generate`,
with Baton's draft head and all forwards fused. `make parity` runs more configurations, and a longer table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.client import AsyncClient
from baton.events import Completion, tokens_per_forward
from baton.full_speed import await_fused
from baton.local_pair import LocalPair
from common.checkpoints.source import resolve_draft
from common.sampling.params import ResolvedSampling
from tests.parity.reference import Reference
from tests.real.conftest import MAX_TOKENS, NEW_TOKENS, ONE_THREAD, SIZES, Prompts, check
from tests.support.drafted import Counts, Drafted, load_drafted
from tests.support.fused import assert_all_fused, forwards, fused
from tests.support.pair import MakePair, PairOptions
from tests.support.running_pair import HANDS_ALL_OVER

MIN_TOKENS_PER_FORWARD = 1.5
FUSED_BOUND_S = 900.0
COMMITTED = {
    "chat_one_word": [19556, 17, 1073, 416, 339, 4237, 346, 1834, 47, 2],
    "code_raw": [472, 907, 7779, 253, 18157, 288, 4249, 260, 8661, 288, 325, 8797, 472, 18157, 446, 933],
    "math_raw": [216, 33, 38, 28, 216, 34, 32, 28, 216, 34, 41, 28, 216, 35, 38, 28],
    "math_series": [33, 30, 378, 2028, 282, 260, 808, 304, 12365, 2966, 314, 1836, 411, 260, 7961, 304],
}
"""What `generate` gives after some prompts. No two choices nearly tie there."""


def greedy(drafted: Drafted, max_tokens: int) -> ResolvedSampling:
    ends = tuple(drafted.target.eos_token_ids)
    return ResolvedSampling(seed=0, max_tokens=max_tokens, temperature=0.0, eos_token_ids=ends)


def test_short_outputs_are_the_committed_tokens(model_dir: Path, prompts: Prompts, make_pair: MakePair) -> None:
    """The forwards use operators, which compile nothing for this model alone."""
    drafted = load_drafted(model_dir, resolve_draft("demo"))
    options = PairOptions(num_draft_tokens=4, context_tokens=128, prefill_tokens=512, decode_tokens=512)
    pair = make_pair(drafted.target, options, draft=drafted.head)
    for name, ids in prompts:
        if name in COMMITTED:
            pair.submit(name, ids, greedy(drafted, 16))
    pair.run(bound_s=300)
    assert {name: outcome.token_ids for name, outcome in pair.outcomes.items()} == COMMITTED
    assert Counts.of(pair.outcomes.values()).num_accepted > 0


@pytest.mark.thorough
def test_a_tree_in_one_process_sixteen_at_once_with_overlap(
    drafted: Drafted, reference: Reference, prompts: Prompts, make_pair: MakePair
) -> None:
    options = PairOptions(draft_topk=4, num_draft_steps=3, num_draft_tokens=15, **SIZES)
    models = drafted.target, drafted.head
    with fused(*models, max_tokens=MAX_TOKENS) as decode, fused(*models, max_tokens=MAX_TOKENS) as prefill:
        pair = make_pair(decode[0], options, draft=decode[1], prefill_model=prefill[0], prefill_draft=prefill[1])
        for name, ids in prompts:
            pair.submit(name, ids, greedy(drafted, NEW_TOKENS))
        pair.finish_prefill(bound_s=500)
        pair.run(bound_s=500)
    assert max(step.batch_size for step in pair.decode_steps) == 16
    check(reference, prompts, {name: outcome.token_ids for name, outcome in pair.outcomes.items()})
    assert Counts.of(pair.outcomes.values()).tokens_per_step > MIN_TOKENS_PER_FORWARD
    known = {name: reference.tokens(ids)[: len(COMMITTED[name])] for name, ids in prompts if name in COMMITTED}
    assert known == COMMITTED


@pytest.mark.thorough
def test_a_chain_over_grpc_between_two_processes_alone_in_chunks_of_512_without_overlap(
    model_dir: Path, reference: Reference, prompts: Prompts, forked: Callable[..., LocalPair]
) -> None:
    async def run(address: str) -> dict[str, Completion]:
        async with AsyncClient(address) as client:
            return {
                name: await client.complete(token_ids=ids, temperature=0.0, max_tokens=NEW_TOKENS) for name, ids in some
            }

    some = prompts[::2]
    chain = ("--draft=demo", "--num-draft-tokens=4", "--no-adaptive-depth", "--disabled-fast-paths=overlap")
    with forked(
        model=str(model_dir),
        dtype="float32",
        prefill_args=("--chunk-tokens=512", "--draft=demo", *ONE_THREAD),
        decode_args=(HANDS_ALL_OVER, *chain, *ONE_THREAD),
        exposes_metrics=True,
    ) as pair:
        assert await_fused(pair.metrics_addresses, timeout_s=FUSED_BOUND_S)
        before = [forwards(address) for address in pair.metrics_addresses]
        completions = asyncio.run(run(pair.decode_addresses[0]))
        for address, earlier in zip(pair.metrics_addresses, before, strict=True):
            assert_all_fused(forwards(address) - earlier, drafts=True)
    check(reference, some, {name: list(completion.token_ids) for name, completion in completions.items()})
    counts = [completion.speculation for completion in completions.values()]
    assert tokens_per_forward(count for count in counts if count is not None) > MIN_TOKENS_PER_FORWARD
