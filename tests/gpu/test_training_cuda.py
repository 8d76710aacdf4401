"""Training a head on CUDA gives the same result as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import save_last_token_model
from tests.training.cases import quiet, save_sampled_data, tiny_config
from training.curves import Evaluation
from training.run import prepare_training

pytestmark = pytest.mark.gpu
pytest.importorskip("matplotlib", reason="training draws its curve")
pytest.importorskip("platformdirs", reason="training keeps digests in the user's cache")


def train(directory: Path, *, device: str) -> list[Evaluation]:
    target_dir = save_last_token_model(directory / "target", logits_std=2.0)
    data = save_sampled_data(directory / "data.npz", target_dir, num_conversations=200)
    config = tiny_config(max_tokens=12000, batch_tokens=128, device=device, dtype="float32", muon_lr=0.01)
    return prepare_training(target_dir, [data], directory / "out", config=config, progress=quiet()).run()


def test_it_begins_with_a_head(tmp_path: Path) -> None:
    train(tmp_path, device="cpu")
    config = tiny_config(device="cuda", max_tokens=1000)
    begun = prepare_training(
        tmp_path / "target",
        [tmp_path / "data.npz"],
        tmp_path / "more",
        config=config,
        progress=quiet(),
        start_from=tmp_path / "out" / "head",
        revises_vocab=True,
    )
    assert begun.run()


def test_it_learns_what_it_learns_on_the_cpu(tmp_path: Path) -> None:
    on_cuda, on_cpu = (train(tmp_path / device, device=device) for device in ("cuda", "cpu"))
    assert [each.tokens for each in on_cuda] == [each.tokens for each in on_cpu]
    first, expected = on_cuda[0], on_cpu[0]
    assert first.train_loss == pytest.approx(expected.train_loss, rel=0.02)
    last, expected = on_cuda[-1], on_cpu[-1]
    assert last.train_loss[0] < 0.9 * first.train_loss[0]
    assert last.accuracy[0] == pytest.approx(expected.accuracy[0], abs=0.05)
