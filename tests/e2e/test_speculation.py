"""Speculation through two processes and gRPC: the tokens of decoding without it, counted, and agreed on beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton import errors
from baton.local_pair import LocalPair
from baton.requests import SamplingOptions
from tests.e2e.running import BOUND_S, COMMON_ARGS, RunningPair, clients_of, running_pair, wait_until
from tests.support.draft_heads import save_copy_head

NUM_DRAFT_TOKENS = 3
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
def pair(last_token_model_dir: Path, head_dir: Path) -> Iterator[RunningPair]:
    with running_pair(
        last_token_model_dir,
        shared_args=(f"--draft={head_dir}",),
        decode_args=(f"--num-draft-tokens={NUM_DRAFT_TOKENS}",),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def plain(last_token_model_dir: Path) -> Iterator[RunningPair]:
    with running_pair(last_token_model_dir) as running:
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
    counts = [completion.speculation for completion in speculated]
    assert all(count is not None for count in counts), "the client is not told"
    num_drafted = sum(count.num_drafted_tokens for count in counts if count is not None)
    num_accepted = sum(count.num_accepted_tokens for count in counts if count is not None)
    assert NUM_DRAFT_TOKENS * sum(count.num_verify_steps for count in counts if count is not None) == num_drafted
    assert num_drafted / 2 < num_accepted < num_drafted


def test_a_prefill_service_without_the_head_is_refused_by_name(
    pair: RunningPair, last_token_model_dir: Path, head_dir: Path
) -> None:
    processes = LocalPair(
        model=str(last_token_model_dir),
        dtype="float32",
        prefill_args=COMMON_ARGS,
        decode_args=(*COMMON_ARGS, f"--draft={head_dir}", "--prefill-timeout-s=1"),
    )
    with clients_of(processes) as running:
        try:
            processes.start()
            wait_until(lambda: bool(running.load().prefill_replicas[0].reason), about=running.load)
            with pytest.raises(errors.FailedPrecondition, match="layer_groups"):
                running.client.complete(token_ids=[10, 11], timeout_s=BOUND_S)
        finally:
            processes.stop()
