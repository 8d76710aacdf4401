"""Makes the demo model before services start, so that people see the download and only one process does it."""

from __future__ import annotations

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from baton.cli.output import print_json, text_console
from baton.errors import FailedPrecondition

DEMO_MODEL = "demo"


def prepare_model(model: str, *, as_json: bool) -> None:
    """Nothing for a model other than the demo. Raises FailedPrecondition when the demo model cannot be made."""
    if model != DEMO_MODEL:
        return
    from common.demo_model import ensure_demo_model
    from common.errors import StartupError
    from common.model_cache import default_cache_dir

    cache_dir = default_cache_dir()  # before anything is shown: it says what is not installed
    try:
        if as_json:
            ensure_demo_model(_json_progress, cache_dir=cache_dir)
        else:
            with _Bars() as bars:
                ensure_demo_model(bars, cache_dir=cache_dir)
    except StartupError as error:
        raise FailedPrecondition(str(error), reason="DEMO_MODEL") from error


def _json_progress(stage: str, num_done: int, num_total: int) -> None:
    print_json("progress", stage=stage, num_done=num_done, num_total=num_total)


class _Bars(Progress):
    """One bar per stage; without a terminal, one line per stage."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeElapsedColumn(),
            console=text_console(),
        )
        self._stages: dict[str, TaskID] = {}

    def __call__(self, stage: str, num_done: int, num_total: int) -> None:
        if stage not in self._stages:
            self._stages[stage] = self.add_task(stage, total=None)
            if not self.console.is_terminal:
                self.console.print(stage)
        self.update(self._stages[stage], completed=num_done, total=num_total or None)
