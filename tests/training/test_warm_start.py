"""Tests of a run that starts from an existing head: it takes the head's weights, and the head's or the data's draft
vocabulary.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ConfigError
from tests.training.cases import quiet, save_sampled_data, tiny_config
from training.head_files import StartingHead
from training.run import prepare_training
from training.target import load_target
from training.trainer import Trainer
from training.vocabulary import DraftVocabulary

Prepare = Callable[..., Trainer]


@pytest.fixture(scope="module")
def head_dir(tmp_path_factory: pytest.TempPathFactory, last_token_model_dir: Path, sampled_data: Path) -> Path:
    """A head that was trained for a short while."""
    out = tmp_path_factory.mktemp("first")
    config = tiny_config(max_tokens=9000, batch_tokens=128)
    prepare_training(last_token_model_dir, [sampled_data], out, config=config, progress=quiet()).run(lambda: False)
    return out / "head"


@pytest.fixture
def prepare(tmp_path: Path, last_token_model_dir: Path, sampled_data: Path) -> Prepare:
    def start(
        start_from: Path | None, *, data: Path = sampled_data, revises_vocab: bool = False, **changes: Any
    ) -> Trainer:
        return prepare_training(
            last_token_model_dir,
            [data],
            tmp_path / "out",
            config=tiny_config(**changes),
            progress=quiet(),
            start_from=start_from,
            revises_vocab=revises_vocab,
        )

    return start


def test_it_begins_where_the_head_ended(prepare: Prepare, head_dir: Path) -> None:
    weights = load_file(head_dir / "model.safetensors")
    begun = prepare(head_dir, ttt_steps=2)
    for name, weight in begun.head.state_dict().items():
        assert torch.equal(weight, weights[name].float()), name
    (first,) = begun.run(after_three_steps())
    (from_nothing,) = prepare_fresh(prepare, begun).run(after_three_steps())
    assert first.accuracy[0] > from_nothing.accuracy[0] + 0.3


def after_three_steps() -> Callable[[], bool]:
    """Returns a stop condition that is True after three steps, when there has been one evaluation."""
    asked = iter([False] * 3 + [True])
    return lambda: next(asked)


def prepare_fresh(prepare: Prepare, other: Trainer) -> Trainer:
    shutil.rmtree(other.workplace.out / "head")
    for name in ("last.pt", "stable.pt", "curve.jsonl"):
        (other.workplace.out / name).unlink(missing_ok=True)
    return prepare(None, ttt_steps=2)


def test_the_draft_vocabulary_stays_the_heads(
    prepare: Prepare, head_dir: Path, tmp_path: Path, last_token_model_dir: Path
) -> None:
    other = save_sampled_data(tmp_path / "other.npz", last_token_model_dir, num_conversations=60, seed=9)
    chosen = prepare(None, data=other).workplace.vocabulary.token_ids
    offsets = load_file(head_dir / "model.safetensors")["d2t"].numpy()
    assert not np.array_equal(chosen, np.arange(48) + offsets), "the data would have chosen the same"
    shutil.rmtree(tmp_path / "out")
    begun = prepare(head_dir, data=other)
    assert np.array_equal(begun.workplace.vocabulary.token_ids, np.arange(48) + offsets)


def test_a_revised_vocabulary_takes_the_heads_rows_along(
    prepare: Prepare, head_dir: Path, tmp_path: Path, last_token_model_dir: Path
) -> None:
    other = save_sampled_data(tmp_path / "other.npz", last_token_model_dir, num_conversations=60, seed=9)
    weights = load_file(head_dir / "model.safetensors")
    before = (np.arange(48) + weights["d2t"].numpy()).tolist()
    begun = prepare(head_dir, data=other, revises_vocab=True)
    after = begun.workplace.vocabulary.token_ids.tolist()
    assert set(after) - set(before) and set(after) & set(before), "the same vocabulary, or another altogether"
    for row, token_id in zip(begun.head.lm_head.weight, after, strict=True):
        if token_id in before:
            assert torch.equal(row, weights["lm_head.weight"][before.index(token_id)].float()), token_id
    target_rows = load_target(last_token_model_dir, device="cpu").output_rows(torch.tensor(after))
    starting = StartingHead(
        weights, DraftVocabulary(np.array(before), begun.workplace.vocabulary.vocab_size), digest=""
    )
    assert torch.equal(begun.head.lm_head.weight, starting.output_rows(begun.workplace.vocabulary, target_rows))
    assert torch.equal(begun.head.fc.weight, weights["fc.weight"].float())


@pytest.mark.parametrize("num_known", [0, 1, 40])
def test_rows_of_new_tokens_are_the_targets_moved_as_those_of_known_tokens_were(num_known: int) -> None:
    torch.manual_seed(0)
    target_rows = torch.randn(100, 8)
    moved = target_rows @ (torch.eye(8) + 0.5 * torch.randn(8, 8)) + torch.randn(8)
    before = DraftVocabulary(np.arange(60), 100)
    after = DraftVocabulary(np.arange(60 - num_known, 100), 100)
    head = StartingHead({"lm_head.weight": moved[:60]}, before, digest="")
    rows = head.output_rows(after, target_rows[after.token_ids])
    assert torch.equal(rows[:num_known], moved[60 - num_known : 60])
    if num_known == 0:
        assert torch.equal(rows, target_rows[60:])
    if num_known == 40:
        wanted = moved[60:]
        assert (rows[40:] - wanted).norm() < 0.3 * (target_rows[60:] - wanted).norm()


@pytest.mark.parametrize("num_known", [1, 32, 33, 34, 60])
def test_rows_of_new_tokens_are_not_moved_far_when_the_moves_of_known_ones_say_nothing(num_known: int) -> None:
    """The changes of the known tokens' rows are unrelated to the target's rows, and there are nearly as many of them as
    the fitted map has inputs.
    """
    torch.manual_seed(0)
    target_rows, moves = torch.randn(400, 32), torch.randn(400, 32)
    before, after = DraftVocabulary(np.arange(num_known), 400), DraftVocabulary(np.arange(400), 400)
    head = StartingHead({"lm_head.weight": (target_rows + moves)[:num_known]}, before, digest="")
    new_moves = (head.output_rows(after, target_rows) - target_rows)[num_known:]
    assert new_moves.norm(dim=1).mean() < 2 * moves.norm(dim=1).mean()


def test_another_vocabulary_is_another_run(prepare: Prepare, head_dir: Path) -> None:
    prepare(head_dir, revises_vocab=True).run(lambda: True)
    with pytest.raises(ConfigError, match=r"^start_from: "):
        prepare(head_dir).run(lambda: True)


DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "no d2t": (lambda weights: weights.pop("d2t"), "d2t"),
    "no fc": (lambda weights: weights.pop("fc.weight"), r"fc\.weight"),
    "a row too few": (
        lambda weights: weights.update({"lm_head.weight": weights["lm_head.weight"][:-1].contiguous()}),
        r"lm_head\.weight has 47 rows for 48 in d2t",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_head_is_refused_by_its_tensor(damage: str, prepare: Prepare, head_dir: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(head_dir, tmp_path / "cut"))
    weights, (change, named) = load_file(directory / "model.safetensors"), DAMAGES[damage]
    change(weights)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(ConfigError, match=f"(?s)start_from: .*{named}"):
        prepare(directory)


def test_a_head_that_cannot_be_started_from_is_refused_by_what_differs(
    prepare: Prepare, head_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"start_from: draft_vocab_size: the head in .* has 48, this run 40"):
        prepare(head_dir, draft_vocab=40)
    with pytest.raises(ConfigError, match=f"start_from: {tmp_path}: no head to read"):
        prepare(tmp_path)
    with pytest.raises(ConfigError, match=r"^revises_vocab: there is no head to start from"):
        prepare(None, revises_vocab=True)


def test_a_checkpoint_that_began_otherwise_is_refused(prepare: Prepare, head_dir: Path) -> None:
    prepare(head_dir).run(iter([False, True, True]).__next__)
    with pytest.raises(ConfigError, match=r"^start_from: this run has None, the checkpoint"):
        prepare(None).run(lambda: False)
