"""Tests of mistakes in a draft head that raise no error but would lose most of its acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import DraftMismatch
from common.model.capture import HiddenCapture
from common.model.loader import load_target
from tests.draft.conftest import Load
from tests.draft.paged_draft import PagedDraft
from tests.draft.reference import ReferenceEagle3
from tests.model.paged_model import PagedModel
from tests.support.draft_heads import save_eagle1_head, save_eagle3_head
from tests.support.head_parts import load_head, save_head, without

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


def test_2_d2t_holds_offsets(tmp_path: Path, target_dir: Path, load: Load) -> None:
    directory = save_eagle3_head(tmp_path, target_dir=target_dir)
    _, tensors = load_head(directory)
    expected = tensors["t2d"].nonzero().flatten()
    assert expected.tolist() != tensors["d2t"].tolist()
    assert load(directory).token_ids.tolist() == expected.tolist()


def test_2_d2t_lost_or_holding_target_ids_is_an_error(tmp_path: Path, target_dir: Path, load: Load) -> None:
    config, tensors = load_head(save_eagle3_head(tmp_path / "good", target_dir=target_dir))
    with pytest.raises(DraftMismatch, match="d2t is missing"):
        load(save_head(tmp_path / "lost", config, without(tensors, ["d2t"])))
    mapping = tensors["t2d"].nonzero().flatten()
    with pytest.raises(DraftMismatch, match=r"d2t leads outside|t2d marks other"):
        load(save_head(tmp_path / "mapping", config, {**tensors, "d2t": mapping}))


@pytest.mark.parametrize("draft_vocab_size", [48, 267])
def test_3_a_missing_lm_head_is_an_error(draft_vocab_size: int, tmp_path: Path, target_dir: Path, load: Load) -> None:
    directory = save_eagle3_head(tmp_path, target_dir=target_dir, own_lm_head=False, draft_vocab_size=draft_vocab_size)
    with pytest.raises(DraftMismatch, match=rf"{directory}.*lm_head\.weight is missing"):
        load(directory)


def test_4_an_eagle3_head_does_not_pass_as_an_eagle1_head(tmp_path: Path, target_dir: Path, load: Load) -> None:
    eagle1, _ = load_head(save_eagle1_head(tmp_path / "eagle1", target_dir=target_dir, fc_bias=False))
    _, eagle3_tensors = load_head(save_eagle3_head(tmp_path / "eagle3", target_dir=target_dir))
    with pytest.raises(DraftMismatch, match=r"fc\.weight is \[64, 192\].*an EAGLE-1 head.*\[64, 128\]"):
        load(save_head(tmp_path / "mixed", eagle1, eagle3_tensors))


def test_4_an_eagle1_head_does_not_pass_as_an_eagle3_head(tmp_path: Path, target_dir: Path, load: Load) -> None:
    eagle3, _ = load_head(save_eagle3_head(tmp_path / "eagle3", target_dir=target_dir, draft_vocab_size=None))
    _, eagle1_tensors = load_head(save_eagle1_head(tmp_path / "eagle1", target_dir=target_dir))
    with pytest.raises(DraftMismatch, match=r"fc\.weight is \[64, 128\].*an EAGLE-3 head.*\[64, 192\]"):
        load(save_head(tmp_path / "mixed", {**eagle3, "draft_vocab_size": 268}, eagle1_tensors))


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
