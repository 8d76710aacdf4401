"""Tests that a head's acceptance does not depend on how prompts are split into chunks: the head gets with each chunk
the prompt token that follows it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from common.draft.load import load_draft
from common.model.loader import load_target
from common.prompts.chunk_batch import Chunk
from common.sampling.params import ResolvedSampling
from tests.support.draft_heads import save_eagle3_head
from tests.support.pair import MakePair, PairOptions

NUM_REQUESTS = 16
NEW_TOKENS = 32

Counts = list[tuple[int, int]]


@pytest.fixture
def count(make_pair: MakePair, last_token_model_dir: Path, tmp_path: Path):  # type: ignore[no-untyped-def]
    """A function that runs requests, with prompts split into chunks of `chunk_tokens`, and returns their numbers of
    verify steps and accepted drafts.

    The head is random: some of its guesses are right, and all of them depend on its own KV.
    """
    head_dir = save_eagle3_head(tmp_path, target_dir=last_token_model_dir)
    target = load_target(last_token_model_dir, device="cpu", dtype="float32")
    head = load_draft(head_dir, target=target, device="cpu", dtype="float32")
    target.capture_hidden(head.capture)

    def run(chunk_tokens: int, *, resumed_tokens: int = 0) -> Counts:
        pair = make_pair(target, PairOptions(chunk_tokens=chunk_tokens, num_draft_tokens=3), draft=head)
        for number in range(NUM_REQUESTS):
            tokens = [4 + (number * 11 + place * (number + 3)) % 56 for place in range(33 + 5 * number)]
            sampling = ResolvedSampling(seed=number, max_tokens=NEW_TOKENS, temperature=1.0)
            pair.submit(str(number), tokens, sampling, prompt_len=len(tokens) - resumed_tokens)
        pair.run()
        ends = [pair.outcomes[str(number)].finished for number in range(NUM_REQUESTS)]
        counts = [end.speculation for end in ends if end is not None]
        return [(each.num_verify_steps, each.num_accepted_tokens) for each in counts if each is not None]

    return run


def test_acceptance_is_the_same_for_every_chunk_size(count) -> None:  # type: ignore[no-untyped-def]
    whole = count(512)
    assert len(whole) == NUM_REQUESTS
    assert sum(accepted for _, accepted in whole) > NUM_REQUESTS, "too few drafts were accepted to tell"
    assert count(16) == count(64) == whole


def test_acceptance_is_the_same_when_chunks_end_inside_a_resumed_output(count) -> None:  # type: ignore[no-untyped-def]
    assert count(16, resumed_tokens=20) == count(512, resumed_tokens=20)


def test_it_is_seen_when_a_chunk_does_not_end_with_the_prompts_next_token(  # type: ignore[no-untyped-def]
    count, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = count(512)
    next_ids = Chunk.next_ids

    def ends_with_nothing(self: Chunk, num_ahead: int) -> NDArray[np.int64]:
        return np.append(next_ids(self, num_ahead)[:-1], 0)

    monkeypatch.setattr(Chunk, "next_ids", ends_with_nothing)
    assert count(16) != whole
