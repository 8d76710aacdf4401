"""Tests of mistakes in a draft head that raise no error but would lose most of its acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.model.capture import HiddenCapture
from tests.draft.conftest import Load
from tests.draft.paged_draft import PagedDraft
from tests.draft.reference import ReferenceEagle3
from tests.model.paged_model import PagedModel
from tests.support.draft_heads import save_eagle3_head
from tests.support.loading import load_target

IDS = [5, 9, 2, 14, 77, 31, 8]


@pytest.mark.parametrize("style", ["midlayer", "layers", "sglang", "speculators"])
@pytest.mark.parametrize("captured_layers", [(2, 3, 4), (0, 1, 6), None], ids=str)
def test_1_captured_layers_are_not_off_by_one(
    captured_layers: tuple[int, ...] | None, style: Any, tmp_path: Path, target_dir: Path, load: Load
) -> None:
    """Compares with transformers' `hidden_states`, whose entry k is the input of layer k. The default layers are 2,
    n // 2 and n - 3.
    """
    directory = save_eagle3_head(tmp_path, target_dir=target_dir, captured_layers=captured_layers, style=style)
    head = load(directory)
    target = load_target(target_dir, device="cpu", dtype="float32")
    target.capture_hidden(head.capture)
    captured = PagedCapture(target).captured(IDS)
    model: Any = AutoModelForCausalLM.from_pretrained(str(target_dir), dtype=torch.float32)
    last: list[torch.Tensor] = []  # transformers' own last entry comes after the final norm
    model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    with torch.inference_mode():
        states = [*model(torch.tensor([IDS]), output_hidden_states=True).hidden_states[:-1], *last]
    expected = torch.cat([states[layer][0] for layer in captured_layers or (2, 3, 3)], dim=-1)
    torch.testing.assert_close(captured, expected, atol=1e-4, rtol=1e-4)


class PagedCapture(PagedModel):
    """A PagedModel of one row that keeps the states which the target captured for the head."""

    def __init__(self, target: Any) -> None:
        super().__init__(target, num_rows=1)
        self._target = target

    def captured(self, ids: list[int]) -> torch.Tensor:
        outputs: list[Any] = []
        forward = self._target.forward
        self._target.forward = lambda batch: outputs.append(forward(batch)) or outputs[-1]
        self.extend({1: ids})
        hidden: torch.Tensor = outputs[-1].hidden
        return hidden


@pytest.mark.parametrize("first_position", [0, 16, 4090])
def test_5_a_head_that_declares_a_shorter_context_than_its_target_serves_the_targets(
    first_position: int, tmp_path: Path, target_dir: Path, load: Load
) -> None:
    """The target's context is 4096 tokens. Drafts near its end may lie at positions past it."""
    directory = save_eagle3_head(tmp_path, target_dir=target_dir, max_position_embeddings=16)
    head = load(directory)
    assert head.capture == HiddenCapture(layers=(0, 1, 2))
    reference = ReferenceEagle3(directory, target_dir, first_position=first_position)
    captured = torch.randn((20, 3 * 64), generator=torch.Generator().manual_seed(1))
    ids = list(range(20))
    output = PagedDraft(head).extend({1: (ids, head.fuse(captured))}, first_position=first_position)[1]
    expected = reference.extend(ids, reference.fuse(captured))
    torch.testing.assert_close(output, expected, atol=1e-3, rtol=1e-3)
