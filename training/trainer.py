"""The training loop: steps, evaluations, checkpoints. Muon trains all matrices but the output layer's; AdamW
trains norms and the output layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

from training import checkpoint
from training.batches import BatchSource
from training.checkpoint import LAST, STABLE, RunCheckpoint, RunState
from training.config import TrainConfig
from training.curves import Evaluation, EvaluationCurve
from training.data import Ints
from training.head import TrainableHead
from training.head_files import export_head
from training.objective import Objective
from training.progress import ConsoleProgress, Stage
from training.vocabulary import DraftVocabulary

_WEIGHT_DECAY = 0.01
_MAX_GRADIENT_NORM = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """The inputs and outputs of a run.

    `identity` holds the settings that checkpoints must share with the run. `head_config` is the head's config.json.
    """

    out: Path
    identity: dict[str, Any]
    head_config: dict[str, Any]
    vocabulary: DraftVocabulary
    source: BatchSource
    train: Ints
    held_out: Ints


@dataclass(slots=True)
class _Pace:
    """Measures tokens per second of training steps only, without evaluations."""

    num_tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Trainer:
    """Runs the training loop."""

    config: TrainConfig
    workplace: Workplace
    head: TrainableHead
    objective: Objective
    progress: ConsoleProgress
    _optimizers: _Optimizers = field(init=False)
    _state: RunState = field(init=False)
    _curve: EvaluationCurve = field(init=False)
    _groups: list[Ints] = field(init=False, default_factory=list)
    _saved_s: float = field(init=False, default=0.0)
    _since_s: float = field(init=False, default=0.0)
    _exported_tokens: int | None = field(init=False, default=None)
    _pace: _Pace = field(init=False, default_factory=_Pace)

    def run(self, should_stop: Callable[[], bool] = lambda: False) -> list[Evaluation]:
        """Trains until the end, or until `should_stop`, called before each step, returns True.

        Continues from the checkpoint in the run's directory if there is one. At the end it saves a checkpoint and
        exports the head. Returns all evaluations, including those made before the run was continued. Raises ConfigError
        for a checkpoint of another run.
        """
        self._optimizers = _Optimizers(self.head, self.config)
        self._restore()
        self._since_s = self._saved_s = time.monotonic()
        total, begun = self.config.max_tokens, min(self._state.num_tokens, self.config.max_tokens)
        with self.progress.stage("training", total, "answer tokens", num_done=begun) as stage:
            while self._state.num_tokens < total and not should_stop():
                self._step(stage)
        if self._state.num_tokens >= total and self._state.num_losses:
            self._evaluate()
        self._save(LAST)
        if self._exported_tokens != self._state.num_tokens:
            self._export()
        return self._curve.evaluations

    def _restore(self) -> None:
        found = checkpoint.find(self.workplace.out, self.workplace.identity, self.config.schedule)
        self._state = RunState(loss_sums=[0.0] * self.config.ttt_steps)
        if found is not None:
            self._state = found.state
            self.head.load_state_dict(found.head)
            self._optimizers.load_state(found.optimizers)
            self.progress.line(f"going on from {found.state.num_tokens} answer tokens")
        self._curve = EvaluationCurve(self.workplace.out, num_tokens=self._state.num_tokens)
        self._groups = self._epoch()

    def _step(self, stage: Stage) -> None:
        state, start_s = self._state, time.monotonic()
        batch = self.workplace.source.load(self._groups[state.group])
        before, after = state.num_tokens, state.num_tokens + batch.num_answer_tokens
        if before <= self.config.schedule.decay_start < after:
            self._save(STABLE)
        losses = self.objective.losses(batch)
        self.objective.total(losses).backward()
        self._optimizers.step(self.config.schedule.factor(after))
        self._count(after, losses.detach())
        self._pace.num_tokens += batch.num_answer_tokens
        self._pace.seconds += time.monotonic() - start_s
        loss = " ".join(f"{value / state.num_losses:.3f}" for value in state.loss_sums)
        stage.advance(batch.num_answer_tokens, f"loss {loss}  {self._pace.tokens_per_s:.0f} tokens/s")
        if before // self.config.eval_tokens < after // self.config.eval_tokens:
            self._evaluate()
        if time.monotonic() - self._saved_s >= 60 * self.config.checkpoint_minutes:
            self._save(LAST)
            self._saved_s = time.monotonic()

    def _count(self, num_tokens: int, losses: Tensor) -> None:
        state = self._state
        state.num_tokens = num_tokens
        state.num_steps += 1
        state.num_losses += 1
        state.loss_sums = [total + loss for total, loss in zip(state.loss_sums, losses.tolist(), strict=True)]
        state.group += 1
        if state.group == len(self._groups):
            state.epoch, state.group = state.epoch + 1, 0
            self._groups = self._epoch()

    def _epoch(self) -> list[Ints]:
        place = self.workplace
        return place.source.epoch(place.train, seed=self.config.seed, epoch=self._state.epoch)

    def _evaluate(self) -> None:
        state, place = self._state, self.workplace
        measured = self.objective.measure(place.source.load(group) for group in place.source.grouped(place.held_out))
        self._tick()
        evaluation = Evaluation(
            tokens=state.num_tokens,
            minutes=round(state.seconds / 60, 2),
            train_loss=tuple(round(total / state.num_losses, 4) for total in state.loss_sums),
            accuracy=tuple(round(value, 4) for value in measured.accuracy),
            cumulative=tuple(round(value, 4) for value in measured.cumulative),
            tau=round(measured.tau, 4),
        )
        state.loss_sums, state.num_losses = [0.0] * len(state.loss_sums), 0
        self._pace = _Pace()
        self._curve.add(evaluation)
        self.progress.line(evaluation.summary())
        self._export()

    def _export(self) -> None:
        place = self.workplace
        self._exported_tokens = self._state.num_tokens
        size = export_head(place.out / "head", place.head_config, self.head, place.vocabulary)
        self.progress.line(f"exported {place.out / 'head'} ({size / 1e6:.1f} MB)")

    def _save(self, name: str) -> None:
        self._tick()
        checkpoint.save(
            self.workplace.out / name,
            RunCheckpoint(
                self.workplace.identity,
                self.config.schedule,
                self._state,
                self.head.state_dict(),
                self._optimizers.state(),
            ),
        )

    def _tick(self) -> None:
        now_s = time.monotonic()
        self._state.seconds += now_s - self._since_s
        self._since_s = now_s


class _Optimizers:
    def __init__(self, head: TrainableHead, config: TrainConfig) -> None:
        self._weights = list(head.parameters())
        matrices = head.matrices()
        by_muon = {id(weight) for weight in matrices}
        others = [weight for weight in self._weights if id(weight) not in by_muon]
        self._parts: list[tuple[Optimizer, float]] = [
            (
                Muon(
                    matrices,
                    lr=config.muon_lr,
                    momentum=0.95,
                    weight_decay=_WEIGHT_DECAY,
                    adjust_lr_fn="match_rms_adamw",
                ),
                config.muon_lr,
            ),
            (AdamW(others, lr=config.lr, betas=(0.9, 0.95), weight_decay=_WEIGHT_DECAY, fused=True), config.lr),
        ]

    def step(self, factor: float) -> None:
        """Clips the gradients, applies them with the learning rates times `factor`, and clears them."""
        torch.nn.utils.clip_grad_norm_(self._weights, _MAX_GRADIENT_NORM)
        for optimizer, rate in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer, _ in self._parts]

    def load_state(self, states: list[dict[str, Any]]) -> None:
        for (optimizer, _), state in zip(self._parts, states, strict=True):
            optimizer.load_state_dict(state)
