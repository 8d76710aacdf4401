"""Tests that chunks of several prompts form one packed sequence without padding, and that only the prompts' last tokens
get logits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from common.attention.backend import ForwardInput
from common.model.forward_program import OnLayerKv
from common.model.target import TargetOutput
from common.sampling.params import ResolvedSampling
from tests.support.draft_heads import save_eagle3_head
from tests.support.faulty_target import FaultyTarget
from tests.support.loading import load_draft, load_target
from tests.support.pair import MakePair, PairOptions

LENGTHS = (40, 3, 17, 1)
CHUNK_TOKENS, BATCH_TOKENS = 16, 32


class CountedTarget(FaultyTarget):
    """A target that records the number of tokens and of logit rows of each prefill forward."""

    seen: list[tuple[int, int]]

    def forward(self, batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> TargetOutput:
        output = super().forward(batch, on_layer_kv=on_layer_kv)
        if batch.logits_rows is not None:
            self.seen.append((batch.input_ids.shape[0], output.logits.shape[0]))
        return output


def test_every_token_is_computed_once_and_every_prompt_has_one_row_of_logits(
    tiny_model_dir: Callable[[str], Path],
    tmp_path: Path,
    make_pair: MakePair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = tiny_model_dir("llama")
    sound = load_target(directory, device="cpu", dtype="float32")
    head = load_draft(save_eagle3_head(tmp_path, target_dir=directory), target=sound, device="cpu", dtype="float32")
    sound.capture_hidden(head.capture)
    target = CountedTarget(sound)
    target.seen = []
    drafted: list[int] = []
    logits_of = head.logits

    def counted(hidden: Tensor, **keywords: int) -> Tensor:
        drafted.append(hidden.shape[0])
        return logits_of(hidden, **keywords)

    options = PairOptions(chunk_tokens=CHUNK_TOKENS, max_batch_tokens=BATCH_TOKENS)
    pair = make_pair(target, options, draft=head)
    for index, length in enumerate(LENGTHS):
        prompt = [3 + (7 * index + place) % 50 for place in range(length)]
        pair.submit(str(index), prompt, ResolvedSampling(seed=index, max_tokens=1))
    monkeypatch.setattr(head, "logits", counted)
    pair.finish_prefill()
    monkeypatch.undo()
    pair.run()
    num_tokens, num_logits = zip(*target.seen, strict=True)
    assert sum(num_tokens) == sum(LENGTHS), "tokens were computed twice, or padding was"
    assert max(num_tokens) <= BATCH_TOKENS
    assert num_tokens[0] == BATCH_TOKENS - 1 or num_tokens[0] == BATCH_TOKENS, (
        "chunks of several prompts share a forward"
    )
    assert sum(num_logits) == len(LENGTHS), "logits of other tokens were computed"
    assert tuple(drafted) == num_logits, "the head's logits are the same prompts' last tokens"
