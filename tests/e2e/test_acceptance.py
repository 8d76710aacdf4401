"""Tests of speculation through two processes: a head's acceptance depends neither on where it runs nor on how prompts
were split, and a request may do without drafts.

tests/features covers every kind of head and of drafts, and test_fingerprint_mismatch.py what both services must agree
on before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.events import Completion
from baton.local_pair import LocalPair
from common.sampling.params import ResolvedSampling
from common.telemetry.stats import SpeculationCounts
from tests.support.draft_heads import save_copy_head
from tests.support.drafted import load_drafted
from tests.support.pair import PairOptions, pairs_that_keep_all
from tests.support.running_pair import BOUND_S, RunningPair, running_pair

pytestmark = pytest.mark.thorough

NUM_REQUESTS = 12
NEW_TOKENS = 32
NUM_DRAFT_TOKENS = 3
ATTENDED_STD = 0.05
CHUNK_SIZES = (16, 64, 512)
PROMPTS = [
    [4 + (number * 11 + place * (number + 3)) % 56 for place in range(33 + 5 * number)]
    for number in range(NUM_REQUESTS)
]

Acceptance = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""For each request: how often a draft was made at each position, and how often it was accepted."""


@pytest.fixture(scope="module")
def head_dir(last_token_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that proposes the usual next token, with noise from its attention. So its own KV decides where two choices
    are close.
    """
    head_dir = save_copy_head(tmp_path_factory.mktemp("head"), target_dir=last_token_model_dir, family="eagle3")
    tensors = load_file(head_dir / "model.safetensors")
    attended = tensors["midlayer.self_attn.o_proj.weight"]
    noise = torch.randn(attended.shape, generator=torch.Generator().manual_seed(3))
    tensors["midlayer.self_attn.o_proj.weight"] = attended + ATTENDED_STD * noise
    save_file(tensors, head_dir / "model.safetensors")
    return head_dir


@pytest.fixture(scope="module", params=CHUNK_SIZES)
def pair(
    request: pytest.FixtureRequest, last_token_model_dir: Path, head_dir: Path, forked: Callable[..., LocalPair]
) -> Iterator[RunningPair]:
    with running_pair(
        last_token_model_dir,
        kind=forked,
        shared_args=(f"--draft={head_dir}",),
        prefill_args=(f"--chunk-tokens={request.param}",),
        decode_args=(f"--num-draft-tokens={NUM_DRAFT_TOKENS}", "--no-adaptive-depth"),
    ) as running:
        yield running


def acceptance(counts: Sequence[SpeculationCounts | None]) -> Acceptance:
    return [(each.drafted_at, each.accepted_at) for each in counts if each is not None]


@pytest.fixture(scope="module")
def reference(last_token_model_dir: Path, head_dir: Path) -> Acceptance:
    """The acceptance of the same engines in one process, for every chunk size."""
    drafted = load_drafted(last_token_model_dir, head_dir)
    found = []
    with pairs_that_keep_all() as make_pair:
        for chunk_tokens in CHUNK_SIZES:
            options = PairOptions(chunk_tokens=chunk_tokens, num_draft_tokens=NUM_DRAFT_TOKENS)
            engines = make_pair(drafted.target, options, draft=drafted.head)
            for number, prompt in enumerate(PROMPTS):
                engines.submit(str(number), prompt, ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, temperature=0.0))
            engines.run()
            ends = [engines.outcomes[str(number)].finished for number in range(NUM_REQUESTS)]
            found.append(acceptance([end.speculation for end in ends if end is not None]))
    assert found[0] == found[1] == found[2]
    return found[0]


def test_acceptance_by_position_is_that_of_the_same_engines_in_one_process(
    pair: RunningPair, reference: Acceptance
) -> None:
    def complete(prompt: list[int]) -> Completion:
        return pair.client.complete(
            token_ids=prompt, max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=BOUND_S
        )

    by_position = [sum(accepted[position] for _, accepted in reference) for position in range(NUM_DRAFT_TOKENS)]
    num_steps = sum(drafted_at[0] for drafted_at, _ in reference)
    assert len(reference) == NUM_REQUESTS
    assert 0.2 * num_steps < by_position[0] < 0.8 * num_steps and by_position[2] > 5, f"{by_position} of {num_steps}"
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        assert acceptance([done.speculation for done in pool.map(complete, PROMPTS)]) == reference


def test_a_request_may_do_without_drafts(pair: RunningPair) -> None:
    with_drafts, without = (
        pair.client.complete(token_ids=[9, 8, 7], max_tokens=NEW_TOKENS, temperature=0.0, speculate=speculate)
        for speculate in (None, False)
    )
    assert with_drafts.token_ids == without.token_ids
    assert with_drafts.speculation is not None and without.speculation is None
    counts = with_drafts.speculation
    assert counts.num_accepted_tokens == sum(counts.accepted_at)
    assert min(counts.draft_s, counts.verify_s, counts.extend_s) > 0
    assert "no_draft_head" not in pair.processes.decode[0].log_file.read_text()
