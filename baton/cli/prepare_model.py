"""Fetches models before the services start, so that users see the download and only one process does it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Self

from rich import progress
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeElapsedColumn

from baton.cli.output import print_json, text_console
from baton.local_pair import LocalPair

if TYPE_CHECKING:
    from common.checkpoints.cache import OnProgress


def prepare_pair(pair: LocalPair, *, as_json: bool) -> None:
    """Checks the pair's settings and fetches its models before its processes start.

    Raises the errors of `baton.preflight`. After any error the pair is stopped, and must not be started.
    """
    try:
        from baton.preflight import check_pair, fetch_models

        settings = check_pair(pair)
        with shown_progress(as_json) as progress:
            fetch_models(settings, progress)
    except BaseException:
        pair.stop()
        raise


def shown_progress(as_json: bool) -> AbstractContextManager[OnProgress]:
    return nullcontext(_json_progress) if as_json else _Bars()


def _json_progress(stage: str, num_done: int, num_total: int) -> None:
    print_json("progress", stage=stage, num_done=num_done, num_total=num_total)


class _Bars(progress.Progress):
    """Shows one progress bar for each stage, such as a download. Without a terminal it prints one line for each.
    Shows nothing before the first stage.
    """

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=text_console(),
        )
        self._stages: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stages:
            self.stop()

    def __call__(self, stage: str, num_done: int, num_total: int) -> None:
        if not self._stages:
            self.start()
        if stage not in self._stages:
            self._stages[stage] = self.add_task(stage, total=None)
            if not self.console.is_terminal:
                self.console.print(stage)
        self.update(self._stages[stage], completed=num_done, total=num_total or None)
