"""Tests that copy heads (heads made from their target's weights) propose the tokens that the target would choose. The
parity tests rely on that.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.draft.load import load_draft
from common.model.loader import load_target
from common.model.target import TargetModel
from tests.draft.paged_draft import PagedDraft
from tests.support.draft_heads import COPY_FAMILIES, MULTI_LAYER_FAMILIES, save_copy_head
from tests.support.models import next_token_logits

HEADS = [
    *((family, 1, None) for family in COPY_FAMILIES),
    *((family, 3, None) for family in MULTI_LAYER_FAMILIES),
    ("eagle3", 1, 48),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "num_layers", "draft_vocab_size"), HEADS)
def test_a_copy_head_proposes_the_targets_greedy_choice_at_every_step(
    family: str,
    num_layers: int,
    draft_vocab_size: int | None,
    dtype: str,
    tmp_path: Path,
    last_token_model_dir: Path,
    last_token_target: TargetModel,
) -> None:
    target = last_token_target
    if dtype != "float32":
        target = load_target(last_token_model_dir, device="cpu", dtype=dtype)
    expected = next_token_logits(last_token_model_dir)
    directory = save_copy_head(
        tmp_path,
        target_dir=last_token_model_dir,
        family=family,
        num_layers=num_layers,
        draft_vocab_size=draft_vocab_size,
    )
    head = load_draft(directory, target=target, device="cpu", dtype=dtype)
    pool = PagedDraft(head, num_rows=1)
    torch.manual_seed(3)
    ids = torch.randint(64, (40,)).tolist()
    captured = torch.randn(len(ids), head.capture.num_states * target.hidden_size).to(target.dtype)
    with torch.inference_mode():
        fused = head.fuse(captured)
    hidden = fused
    for layer in range(num_layers):
        output = pool.extend({1: (ids, hidden)}, layer=layer)[1]
        proposed = head.token_ids[head.logits(output, layer=layer).argmax(-1)]
        agreeing = (proposed == expected[ids].argmax(-1)).float().mean()
        assert agreeing == 1.0 if dtype == "float32" else agreeing >= 0.9
        if dtype == "float32":
            logits = head.logits(output, layer=layer)
            torch.testing.assert_close(logits, expected[ids][:, head.token_ids], atol=1e-3, rtol=1e-3)
        hidden = fused if head.feeds_target_hidden else output
    if num_layers == 1:
        last = output[-1:]
        for _ in range(5):
            token = int(head.token_ids[head.logits(last).argmax(-1)])
            last = pool.decode({1: (token, last)})[1]
            if dtype == "float32":
                logits = head.logits(last)[0]
                torch.testing.assert_close(logits, expected[token][head.token_ids], atol=1e-3, rtol=1e-3)
            assert int(head.token_ids[head.logits(last).argmax(-1)]) == int(expected[token].argmax())
