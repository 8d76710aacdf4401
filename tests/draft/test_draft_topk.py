"""Tests that a service refuses to start with a head that cannot propose as many candidates per level as configured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.config.settings import DecodeSettings
from common.errors import StartupError
from common.service.runtime import open_runtime
from tests.support.draft_heads import save_copy_head, save_eagle3_head


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def start(target_dir: Path, head_dir: Path, *, draft_topk: int) -> None:
    settings = DecodeSettings(model=str(target_dir), draft=str(head_dir), dtype="float32", draft_topk=draft_topk)
    open_runtime(settings)


def test_a_head_of_several_layers_drafts_no_trees(last_token_model_dir: Path, tmp_path: Path) -> None:
    head_dir = save_copy_head(tmp_path, target_dir=last_token_model_dir, family="nextn", num_layers=2)
    with pytest.raises(StartupError, match=r"^draft_topk: .* has 2 layers: it drafts chains, not trees"):
        start(last_token_model_dir, head_dir, draft_topk=2)


def test_no_node_has_more_children_than_the_head_has_tokens(last_token_model_dir: Path, tmp_path: Path) -> None:
    head_dir = save_eagle3_head(tmp_path, target_dir=last_token_model_dir, draft_vocab_size=3)
    with pytest.raises(StartupError, match=r"^draft_topk: 4 of a draft vocabulary of 3"):
        start(last_token_model_dir, head_dir, draft_topk=4)
