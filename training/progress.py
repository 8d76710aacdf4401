"""Shows the progress of long work: a bar on a terminal, an occasional line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich import progress as bars
from rich.console import Console

_LINE_S = 30.0


@dataclass(slots=True)
class Stage:
    """The progress of one stage of work: `num_done` of `num_total`. `figures` is text that is shown beside it."""

    name: str
    unit: str
    num_total: int
    num_done: int
    show: Callable[[Stage], None]
    figures: str = ""

    def advance(self, num_done: int, figures: str = "") -> None:
        self.num_done += num_done
        self.figures = figures
        self.show(self)


@dataclass(slots=True)
class ConsoleProgress:
    """Shows stages of work on a console."""

    console: Console
    _line_due_s: float = field(default=0.0, init=False)

    def line(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def stage(self, name: str, num_total: int, unit: str, *, num_done: int = 0) -> Iterator[Stage]:
        if not self.console.is_terminal:
            self._line_due_s = time.monotonic() + _LINE_S
            yield Stage(name, unit, num_total, num_done, self._print)
            return
        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.TaskProgressColumn(),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[figures]}"),
        )
        with bars.Progress(*columns, console=self.console) as bar:
            task = bar.add_task(name, total=num_total, completed=num_done, figures="")
            yield Stage(
                name,
                unit,
                num_total,
                num_done,
                lambda stage: bar.update(task, completed=stage.num_done, figures=stage.figures),
            )

    def _print(self, stage: Stage) -> None:
        if stage.num_done < stage.num_total and time.monotonic() < self._line_due_s:
            return
        self._line_due_s = time.monotonic() + _LINE_S
        self.line(f"{stage.name}: {stage.num_done} of {stage.num_total} {stage.unit}  {stage.figures}".rstrip())
