"""A drafter without a head: it copies what followed the last token where the row's text had it before. The engine needs
nothing else for it, and tokens are those without drafts, whatever it proposes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config

from common.model.loader import load_target
from common.sampling.params import ResolvedSampling
from common.sampling.state import RowStart
from decode_service.forward.drafter import Drafter, Reading, Verified
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.forward.future_map import RelayedInputs
from decode_service.speculate.spec_info import DraftTree
from tests.support.drafted import Drafted
from tests.support.models import SMALL_VOCAB_SIZE, random_model, save_model
from tests.support.pair import InProcessPair, PairOptions, pairs_that_keep_all

NUM_DRAFTS = 3


class PromptLookup(Drafter):
    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}

    def begin(self, starts: Sequence[RowStart]) -> None:
        self._texts.update({start.row: list(start.token_ids) for start in starts})

    def draft(self, batch: ForwardBatch, inputs: RelayedInputs) -> DraftTree:
        assert [self._texts[row][-1] for row in batch.rows.tolist()] == inputs.tokens.tolist(), (
            "a text is not the row's"
        )
        drafts = [after_last(self._texts[row], batch.spec_info.num_steps) for row in batch.rows.tolist()]
        return DraftTree.chain(torch.tensor(drafts))

    def read(self, batch: ForwardBatch, reading: Reading, verified: Verified) -> Mapping[str, Tensor]:
        columns = (batch.rows.tolist(), verified.tokens.tolist(), verified.accept_lens.tolist())
        for row, token_ids, accept_len in zip(*columns, strict=True):
            self._texts[row] += token_ids[:accept_len]
        return {}


def after_last(text: Sequence[int], num: int) -> list[int]:
    """Returns the `num` tokens that followed the last token where it stood before, or that token again."""
    earlier = [place for place, token in enumerate(text[:-1]) if token == text[-1]]
    found = list(text[earlier[-1] + 1 :][:num]) if earlier else []
    return [*found, *[text[-1]] * (num - len(found))]


def serve(pair: InProcessPair) -> None:
    for number in range(6):
        prompt = [4 + (number * 11 + place * 7) % 56 for place in range(4 + 3 * number)]
        temperature = 0.0 if number % 2 else 0.4
        pair.submit(str(number), prompt, ResolvedSampling(seed=number, max_tokens=24, temperature=temperature))
    pair.run()


@pytest.mark.parametrize("tokens", [4096, 112], ids=["all slots", "few slots"])
def test_tokens_are_those_without_drafts_and_drafts_are_accepted(leaning: Drafted, tokens: int) -> None:
    options = PairOptions(num_draft_tokens=NUM_DRAFTS, decode_tokens=tokens)
    with pairs_that_keep_all() as make_pair:
        plain = make_pair(leaning.target, options)
        serve(plain)
        copying = make_pair(leaning.target, replace(options, drafter=PromptLookup()))
        serve(copying)
    num_accepted = 0
    for name, outcome in copying.outcomes.items():
        assert outcome.finished is not None and outcome.token_ids == plain.outcomes[name].token_ids
        assert outcome.finished.speculation is not None
        num_accepted += outcome.finished.speculation.num_accepted_tokens
    assert num_accepted > 10, f"only {num_accepted} drafts were accepted"
    num_retractions = copying.decode.load().num_retractions
    assert (num_retractions > 0) == (tokens < 4096), f"{num_retractions} retractions"


def test_drafts_may_go_past_the_end_of_a_table_of_positions(tmp_path: Path) -> None:
    """The model looks positions up in a table of 64 rows: nothing may be looked up for drafts after a full context."""
    config = GPT2Config(vocab_size=SMALL_VOCAB_SIZE, n_embd=32, n_layer=2, n_head=2, n_positions=64, eos_token_id=1)
    target = load_target(save_model(tmp_path, random_model(config), SMALL_VOCAB_SIZE), device="cpu", dtype="float32")
    options = PairOptions(num_draft_tokens=NUM_DRAFTS, context_tokens=64)
    sampling = ResolvedSampling(seed=0, max_tokens=20, temperature=0.0)
    seen = []
    with pairs_that_keep_all() as make_pair:
        for pair in (make_pair(target, options), make_pair(target, replace(options, drafter=PromptLookup()))):
            prompts = [[4 + place % 50 for place in range(length)] for length in (44, 8)]
            outcomes = [pair.submit(str(len(prompt)), prompt, sampling) for prompt in prompts]
            pair.run()
            seen.append([(outcome.error, outcome.token_ids) for outcome in outcomes])
    assert seen[0] == seen[1]
    assert [len(token_ids) for _, token_ids in seen[0]] == [20, 20]
