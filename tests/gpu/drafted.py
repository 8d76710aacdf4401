"""Targets on a CUDA device, with draft heads that propose the targets' own choices."""

from __future__ import annotations

from pathlib import Path

from common.draft.head import DraftHead
from common.draft.load import load_draft
from common.model.loader import load_target
from common.model.target import TargetModel
from tests.support.draft_heads import save_copy_head
from tests.support.models import save_last_token_model


def load_drafted(
    directory: Path, family: str, num_layers: int, **options: float
) -> tuple[Path, TargetModel, DraftHead]:
    """Makes and loads a target in float32, and a copy head, which proposes the target's own choices. Returns the
    target's directory, the target (which captures the states that its head reads) and the head. `options` are those of
    `save_last_token_model`.
    """
    target_dir = save_last_token_model(directory / "target", **options)
    head_dir = save_copy_head(directory / "head", target_dir=target_dir, family=family, num_layers=num_layers)
    target = load_target(target_dir, device="cuda", dtype="float32")
    head = load_draft(head_dir, target=target, device="cuda", dtype="float32")
    target.capture_hidden(head.capture)
    return target_dir, target, head
