"""Tests that speculation through two processes and gRPC gives the same tokens as decoding without it, and is counted.

test_fingerprint_mismatch.py covers what both services must agree on before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.events import Completion
from baton.local_pair import LocalPair
from baton.requests import SamplingOptions
from tests.support.draft_heads import save_copy_head
from tests.support.running_pair import BOUND_S, RunningPair, running_pair

NUM_LEVELS = 3
CHAIN = ("--num-draft-tokens=3",)
TREE = ("--num-draft-steps=3", "--num-draft-tokens=9")
NUM_REQUESTS = 8
NEW_TOKENS = 32
KINDS: tuple[SamplingOptions, ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.875, "logprobs": 2},
    {"temperature": 0.75, "repetition_penalty": 1.25, "frequency_penalty": 0.25},
)


@pytest.fixture(scope="module")
def head_dir(last_token_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_copy_head(
        tmp_path_factory.mktemp("head"), target_dir=last_token_model_dir, family="eagle3", draft_vocab_size=50
    )


@pytest.fixture(scope="module")
def layers_dir(last_token_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_copy_head(
        tmp_path_factory.mktemp("layers"), target_dir=last_token_model_dir, family="nextn", num_layers=3
    )


@pytest.fixture(scope="module", params=["chain", "tree", "layers"])
def pair(
    request: pytest.FixtureRequest,
    last_token_model_dir: Path,
    head_dir: Path,
    layers_dir: Path,
    forked: Callable[..., LocalPair],
) -> Iterator[RunningPair]:
    draft = layers_dir if request.param == "layers" else head_dir
    is_tree = request.param == "tree"
    with running_pair(
        last_token_model_dir,
        kind=forked,
        shared_args=(f"--draft={draft}", *(["--draft-topk=3"] if is_tree else [])),
        decode_args=("--no-adaptive-depth", *(TREE if is_tree else CHAIN)),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def plain(last_token_model_dir: Path, forked: Callable[..., LocalPair]) -> Iterator[RunningPair]:
    with running_pair(last_token_model_dir, kind=forked) as running:
        yield running


def test_the_same_tokens_come_with_drafts_accepted_and_rejected(pair: RunningPair, plain: RunningPair) -> None:
    def complete(running: RunningPair, number: int):  # type: ignore[no-untyped-def]
        prompt = [4 + (number * 11 + place * 5) % 50 for place in range(3 + 9 * number)]
        return running.client.complete(
            token_ids=prompt,
            seed=number,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            timeout_s=BOUND_S,
            **KINDS[number % len(KINDS)],
        )

    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        expected = list(pool.map(lambda number: complete(plain, number), range(NUM_REQUESTS)))
        speculated = list(pool.map(lambda number: complete(pair, number), range(NUM_REQUESTS)))
    for completion, reference in zip(speculated, expected, strict=True):
        assert completion.token_ids == reference.token_ids
        assert reference.speculation is None
    counts = [completion.speculation for completion in speculated if completion.speculation is not None]
    assert len(counts) == NUM_REQUESTS, "the client is not told"
    num_steps = sum(count.num_verify_steps for count in counts)
    drafted_at = [sum(count.drafted_at[level] for count in counts) for level in range(NUM_LEVELS)]
    accepted_at = [sum(count.accepted_at[level] for count in counts) for level in range(NUM_LEVELS)]
    assert drafted_at == [num_steps] * NUM_LEVELS
    assert sum(accepted_at) == sum(count.num_accepted_tokens for count in counts)
    assert num_steps / 2 < accepted_at[0] < num_steps
    assert all(min(count.draft_s, count.verify_s, count.extend_s) > 0 for count in counts)


def test_a_request_may_do_without_drafts(pair: RunningPair) -> None:
    def complete(speculate: bool | None) -> Completion:
        return pair.client.complete(token_ids=[9, 8, 7], max_tokens=NEW_TOKENS, temperature=0.0, speculate=speculate)

    with_drafts, without = complete(None), complete(False)
    assert with_drafts.token_ids == without.token_ids
    assert with_drafts.speculation is not None and without.speculation is None


def test_the_decode_service_says_where_nothing_drafts(pair: RunningPair, plain: RunningPair) -> None:
    said = ["no_draft_head" in each.processes.decode[0].log_file.read_text() for each in (plain, pair)]
    assert said == [True, False]
