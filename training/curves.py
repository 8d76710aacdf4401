"""The learning curve of a run: a JSON line for each evaluation, and a plot of all."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.host.replaced_file import replaced


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of an evaluation, after `tokens` answer tokens and `minutes` of training.

    `train_loss` is the mean loss of each draft step since the previous evaluation. `accuracy` and `cumulative` are
    measured on held-out conversations, for each draft step (see `Acceptance`). `tau` is the mean number of tokens per
    forward of the target.
    """

    tokens: int
    minutes: float
    train_loss: tuple[float, ...]
    accuracy: tuple[float, ...]
    cumulative: tuple[float, ...]
    tau: float

    def summary(self) -> str:
        def text(values: tuple[float, ...]) -> str:
            return " / ".join(f"{value:.3f}" for value in values)

        return (
            f"{self.tokens} tokens, {self.minutes:.1f} min: loss {text(self.train_loss)}, "
            f"accepted {text(self.cumulative)}, tau {self.tau:.3f}"
        )


class EvaluationCurve:
    """The evaluations of a run, stored in `directory`/curve.jsonl.

    A run that continues from `num_tokens` drops the evaluations after that.
    """

    def __init__(self, directory: Path, *, num_tokens: int) -> None:
        self._file = directory / "curve.jsonl"
        self._picture = directory / "curve.png"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        read = [_parse(line) for line in lines]
        self.evaluations = [each for each in read if each.tokens <= num_tokens]
        if len(self.evaluations) < len(read):
            self._write()

    def add(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)
        self._write()
        draw(self.evaluations, self._picture)

    def _write(self) -> None:
        with replaced(self._file) as unfinished:
            unfinished.write_text("".join(json.dumps(dataclasses.asdict(each)) + "\n" for each in self.evaluations))


def _parse(line: str) -> Evaluation:
    fields: dict[str, Any] = json.loads(line)
    sequences: dict[str, Any] = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Evaluation(**{**fields, **sequences})


def require_matplotlib() -> None:
    """Raises ConfigError if matplotlib is not installed. The message names the extra that installs it."""
    if find_spec("matplotlib") is None:
        raise ConfigError("training draws its curves with matplotlib: install Baton with its extra `training`")


def draw(evaluations: list[Evaluation], path: Path) -> None:
    from matplotlib.figure import Figure

    millions = [each.tokens / 1e6 for each in evaluations]
    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = figure.subplots(1, 3)
    shown = (
        ("loss in training", "train_loss"),
        ("held-out accuracy", "accuracy"),
        ("held-out acceptance", "cumulative"),
    )
    for axes, (title, name) in zip(panels, shown, strict=True):
        for position in range(len(evaluations[0].accuracy)):
            values = [getattr(each, name)[position] for each in evaluations]
            axes.plot(millions, values, marker=".", label=f"draft {position + 1}")
        axes.set_title(title)
        axes.set_xlabel("million answer tokens")
        axes.grid(alpha=0.3)
    for axes in panels[1:]:
        axes.set_ylim(bottom=0)
    panels[2].set_title(f"held-out acceptance (tau {evaluations[-1].tau:.2f})")
    panels[0].legend()
    with replaced(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=100)
