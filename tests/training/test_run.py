"""Tests of whole training runs on a tiny target: what they learn, the files they leave, and how they resume."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from baton.cli.main import app
from common.errors import ConfigError
from common.model.target import TargetModel
from tests.support.loading import load_draft
from tests.support.models import SMALL_VOCAB_SIZE
from tests.training.cases import LAYERS, quiet, save_data, save_sampled_data, tiny_config
from training import curves, run, trainer
from training.batches import BatchSource
from training.curves import Evaluation
from training.data import join, load_conversations, split
from training.run import prepare_training
from training.vocabulary import most_frequent

Train = Callable[..., list[Evaluation]]
Prepare = Callable[..., trainer.Trainer]


@pytest.fixture(scope="session")
def features_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of features, which the first run of the session computes and later runs reuse."""
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="session")
def prepare(last_token_model_dir: Path, sampled_data: Path, features_dir: Path) -> Prepare:
    """A function that prepares a run into the directory `out`. Its keyword arguments change the settings."""

    def prepared(out: Path, **changes: Any) -> trainer.Trainer:
        config = tiny_config(**changes)
        return prepare_training(
            last_token_model_dir, [sampled_data], out, config=config, progress=quiet(), features_dir=features_dir
        )

    return prepared


@pytest.fixture
def train(tmp_path: Path, prepare: Prepare) -> Train:
    """A function that trains into `tmp_path`/out. Its keyword arguments change the settings."""

    def start(*, out: Path = tmp_path / "out", should_stop: Callable[[], bool] = lambda: False, **changes: Any) -> Any:
        return prepare(out, **changes).run(should_stop)

    return start


@dataclass(frozen=True, slots=True)
class Finished:
    """A completed run of `tiny_config()`."""

    out: Path
    evaluations: list[Evaluation]

    def copy_to(self, out: Path) -> None:
        shutil.copytree(self.out, out)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, prepare: Prepare) -> Finished:
    out = tmp_path_factory.mktemp("finished")
    return Finished(out, prepare(out).run(lambda: False))


def stop_after(num_steps: int) -> Callable[[], bool]:
    left = iter([False] * num_steps + [True] * 2)
    return lambda: next(left)


def without_time(evaluations: list[Evaluation]) -> list[tuple[Any, ...]]:
    return [(each.tokens, each.train_loss, each.accuracy, each.cumulative, each.tau) for each in evaluations]


def cli(out: Path, data: Path | Sequence[Path], model: Path, *options: str) -> Result:
    files = [str(path) for path in ([data] if isinstance(data, Path) else data)]
    layers = ",".join(map(str, LAYERS))
    fixed = ("--model", str(model), "--layers", layers, "--draft-vocab", "48", "--batch-tokens", "128")
    sizes = ("--max-tokens", "12000", "--warmup-tokens", "800", "--eval-tokens", "3000", "--held-out", "20")
    given = ("--out", str(out), "--lr", "5e-3", "--threads", "1")
    return CliRunner().invoke(app, ["train-draft", *files, *fixed, *sizes, *given, *options])


def test_from_nothing_to_a_head_that_drafts(
    tmp_path: Path, sampled_data: Path, last_token_model_dir: Path, last_token_target: TargetModel
) -> None:
    result = cli(tmp_path, sampled_data, last_token_model_dir)
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    first, last = lines[0], lines[-1]
    assert all(after < 0.85 * before for before, after in zip(first["train_loss"], last["train_loss"], strict=True))
    assert last["accuracy"][0] > 0.6 and last["tau"] > 2
    assert last["cumulative"] == sorted(last["cumulative"], reverse=True)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert f"{(tmp_path / 'head' / 'model.safetensors').stat().st_size / 1e6:.1f} MB" in result.stderr
    assert f"tau {last['tau']:.3f}" in result.stderr
    head = load_draft(tmp_path / "head", target=last_token_target, device="cpu", dtype="float32")
    assert (head.capture.layers, head.token_ids.numel()) == (LAYERS, 48)


def test_an_untrained_head_drafts_nothing(train: Train) -> None:
    """The acceptance of an untrained head is the baseline for that of the trained one."""
    (only,) = train(max_tokens=1, batch_tokens=32, lr=1e-9, muon_lr=1e-9)
    assert only.accuracy[0] < 0.2 and only.tau < 1.3


def test_a_stopped_run_goes_on_as_if_it_had_not_been(train: Train, finished: Finished, tmp_path: Path) -> None:
    for num_steps in (3, 8):
        train(should_stop=stop_after(num_steps))
    evaluations = train()
    assert len(evaluations) == 4
    assert without_time(evaluations) == without_time(finished.evaluations)
    ours, theirs = (torch.load(out / "last.pt", weights_only=True) for out in (tmp_path / "out", finished.out))
    assert ours["state"]["num_steps"] == theirs["state"]["num_steps"]
    for name, weight in ours["head"].items():
        assert torch.equal(weight, theirs["head"][name]), name


@pytest.mark.thorough
def test_what_was_evaluated_after_the_checkpoint_is_not_told_twice(
    train: Train, finished: Finished, tmp_path: Path
) -> None:
    train(out=tmp_path / "early", should_stop=stop_after(3))
    out = tmp_path / "out"
    finished.copy_to(out)
    shutil.copy(tmp_path / "early" / "last.pt", out / "last.pt")
    assert without_time(train()) == without_time(finished.evaluations)
    assert len((out / "curve.jsonl").read_text().splitlines()) == len(finished.evaluations)


@pytest.mark.thorough
def test_every_pass_over_the_data_has_an_order_of_its_own(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    epoch = BatchSource.epoch

    def noted(self: BatchSource, *arguments: Any, **keywords: int) -> Any:
        passes.append(keywords["epoch"])
        return epoch(self, *arguments, **keywords)

    monkeypatch.setattr(BatchSource, "epoch", noted)
    train(max_tokens=8000)
    assert passes == [0, 1, 2]


def test_a_finished_run_is_left_as_it_is(train: Train, finished: Finished, tmp_path: Path) -> None:
    finished.copy_to(tmp_path / "out")
    assert train() == finished.evaluations


@pytest.mark.thorough
def test_a_longer_run_goes_on_from_the_start_of_the_decay(train: Train, finished: Finished, tmp_path: Path) -> None:
    longer = train(out=tmp_path / "longer", max_tokens=6000)
    finished.copy_to(tmp_path / "out")
    stable = torch.load(tmp_path / "out" / "stable.pt", weights_only=True)
    assert stable["state"]["num_tokens"] <= 2800 < stable["state"]["num_tokens"] + 512
    assert without_time(train(max_tokens=6000)) == without_time(longer)


def test_a_decay_that_has_begun_cannot_become_another(train: Train, finished: Finished, tmp_path: Path) -> None:
    finished.copy_to(tmp_path / "out")
    (tmp_path / "out" / "stable.pt").unlink()
    with pytest.raises(ConfigError, match=r"max_tokens: .* was trained for 4\d\d\d tokens of 4000"):
        train(max_tokens=6000)


@pytest.mark.parametrize(
    "change",
    [{"ttt_steps": 2}, {"draft_vocab": 40}, {"seed": 1}, {"muon_lr": 0.03}, {"lr": 1e-3}, {"batch_tokens": 256}],
)
def test_a_checkpoint_of_another_run_is_refused_by_what_differs(train: Train, change: dict[str, Any]) -> None:
    train(should_stop=stop_after(1))
    ((name, value),) = change.items()
    with pytest.raises(ConfigError, match=f"^{name}: this run has {value}, the checkpoint"):
        train(**change)


def test_a_checkpoint_is_of_the_files_and_not_only_of_what_is_in_them(
    tmp_path: Path, last_token_model_dir: Path
) -> None:
    """The conversations held out for evaluation depend on where one file ends and the next begins."""

    def part(name: str, first: int, stop: int) -> Path:
        whole = save_sampled_data(tmp_path / "whole.npz", last_token_model_dir, num_conversations=60, seed=3)
        with np.load(whole) as arrays:
            offsets = arrays["offsets"]
            np.savez(
                tmp_path / name,
                tokens=arrays["tokens"][offsets[first] : offsets[stop]],
                offsets=offsets[first : stop + 1] - offsets[first],
                answer_start=arrays["answer_start"][first:stop],
            )
        return tmp_path / name

    for stop in (30, 31):
        files = [part("first.npz", 0, stop), part("second.npz", stop, 60)]
        prepared = prepare_training(
            last_token_model_dir, files, tmp_path / "out", config=tiny_config(), progress=quiet()
        )
        if stop == 30:
            prepared.run(stop_after(1))
    with pytest.raises(ConfigError, match=r"^num_conversations: this run has \[31, 29\], the checkpoint"):
        prepared.run()


def test_a_broken_checkpoint_is_named(train: Train, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for content in (b"", b"no archive"):
        (tmp_path / "out" / "last.pt").write_bytes(content)
        with pytest.raises(ConfigError, match=r"last\.pt: no checkpoint to read"):
            train()


@pytest.mark.parametrize(("minutes", "num_saved"), [(1e-9, 4), (1e6, 1)])
def test_checkpoints_are_written_by_the_clock_and_at_the_end(
    minutes: float, num_saved: int, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = []
    monkeypatch.setattr(trainer.checkpoint, "save", lambda path, _: saved.append(path.name))
    train(checkpoint_minutes=minutes, should_stop=stop_after(3))
    assert saved == ["last.pt"] * num_saved


def test_what_is_held_out_is_neither_trained_on_nor_counted(
    tmp_path: Path, prepare: Prepare, sampled_data: Path
) -> None:
    config = tiny_config(eval_tokens=10**9)  # evaluations use all held-out conversations
    prepared = prepare(tmp_path, eval_tokens=10**9)
    conversations = load_conversations(sampled_data, vocab_size=SMALL_VOCAB_SIZE)
    train, held_out = split([conversations], [sampled_data], num_held_out=config.num_held_out, seed=config.seed)
    wanted = most_frequent(conversations.answer_tokens(train), draft_vocab=48, vocab_size=SMALL_VOCAB_SIZE)
    assert prepared.workplace.vocabulary.token_ids.tolist() == wanted.token_ids.tolist()
    seen = []
    load = prepared.workplace.source.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchSource, "load", lambda _, group: seen.extend(group.tolist()) or load(group))
        prepared.run(stop_after(8))
    assert seen and set(seen).isdisjoint(held_out.tolist())


def test_several_files_are_trained_on_in_the_order_given(
    tmp_path: Path, last_token_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [
        save_sampled_data(tmp_path / f"{seed}.npz", last_token_model_dir, num_conversations=25, seed=seed)
        for seed in (4, 3)
    ]
    monkeypatch.setattr(trainer.Trainer, "run", lambda *_: None)
    result = cli(tmp_path / "out", files, last_token_model_dir)
    assert result.exit_code == 0, result.stderr
    assert "10 conversations to train on, 40 held out" in result.stderr
    features = json.loads((tmp_path / "out" / "features" / "complete.json").read_text())
    both = join([load_conversations(path, vocab_size=SMALL_VOCAB_SIZE) for path in files])
    assert features["data_digest"] == both.digest

    wrong = save_data(tmp_path / "wrong.npz", answer_start=None)
    result = cli(tmp_path / "out", [files[0], wrong], last_token_model_dir)
    assert (result.exit_code, "wrong.npz: the array answer_start is missing" in result.stderr) == (1, True)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_a_signal_ends_a_run_with_checkpoint_and_head(
    tmp_path: Path,
    sampled_data: Path,
    last_token_model_dir: Path,
    features_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    before, export, sent = signal.getsignal(number), trainer.export_head, list[signal.Signals]()

    def exported(*arguments: Any) -> int:
        if not sent:  # at the first evaluation
            sent.append(number)
            os.kill(os.getpid(), number)
        return export(*arguments)

    monkeypatch.setattr(trainer, "export_head", exported)
    result = cli(tmp_path, sampled_data, last_token_model_dir, "--features", str(features_dir))
    assert result.exit_code == 0, result.stderr
    tokens = torch.load(tmp_path / "last.pt", weights_only=True)["state"]["num_tokens"]
    assert 3000 <= tokens < 3000 + 128
    assert (tmp_path / "head" / "model.safetensors").exists()
    assert signal.getsignal(number) is before


def test_while_the_target_runs_a_signal_ends_the_command(
    tmp_path: Path, sampled_data: Path, last_token_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computing the target's features may take long, and nothing of it is worth keeping yet, so the command ends at
    once.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(run, "compute_features", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    result = cli(tmp_path, sampled_data, last_token_model_dir)
    signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130
    assert not (tmp_path / "last.pt").exists()


def test_what_is_wrong_is_said_before_anything_is_computed(
    tmp_path: Path, train: Train, sampled_data: Path, last_token_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^out: .*file"):
        train(out=tmp_path / "file")
    with pytest.raises(ConfigError, match=r"^out: .* is not writable"), monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        train()
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"^device: cuda is not available"):
            train(device="cuda")
    with pytest.raises(ConfigError, match=r"^num_held_out: no held-out answer has 29 tokens"):
        train(ttt_steps=28)
    with pytest.raises(ConfigError, match="extra `training`"), monkeypatch.context() as patch:
        patch.setattr(curves, "find_spec", lambda _: None)
        train()
    assert not (tmp_path / "out" / "features").exists()
    result = cli(tmp_path / "out", save_data(tmp_path / "few.npz"), last_token_model_dir)
    assert (result.exit_code, "num_held_out: 20 of 3 conversations leave none of" in result.stderr) == (1, True)
    result = cli(tmp_path / "out", sampled_data, tmp_path)
    assert (result.exit_code, "config.json: there is no such file" in result.stderr) == (1, True)
