"""Model directories that are made once and kept in the user's cache.

A directory appears by a single rename, so it is complete if it exists. A lock prevents two processes from doing the
same work. Leftovers of an interrupted process are removed by the next one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from common.errors import StartupError
from common.host.child_process import Child

CONVERSION = 5
"""The version of the GGUF conversion and of what the demo model adds to it, part of a converted directory's name. Raise
it whenever the result changes.
"""

_POLL_INTERVAL_S = 0.2


class CannotBeMade(StartupError):
    """A directory cannot be written, or its disk is full."""


class OnProgress(Protocol):
    def __call__(self, stage: str, num_done: int, num_total: int) -> None:
        """Reports the progress. `stage` is a phrase for people; `num_total` is 0 while the stage's size is unknown."""


def silent(stage: str, num_done: int, num_total: int) -> None:
    """Does nothing. It is the OnProgress for callers that report none."""


def default_cache_dir() -> Path:
    import platformdirs  # imported here, as machines without platformdirs use the rest of this module

    return Path(platformdirs.user_cache_dir("baton"))


def kernels_cache_dir() -> Path:
    return default_cache_dir() / "kernels"


def make_once(path: Path, make: Callable[[Path, Path], None], progress: OnProgress) -> Path:
    """Returns the directory `path`. If it does not exist, `make(scratch, out)` fills `out` first, which then becomes
    `path`; `scratch` is for its work.

    If `make` raises or the process dies, `path` does not exist. `progress` is told if another process is waited for.
    Raises CannotBeMade.
    """
    try:
        return _made_once(path, make, progress)
    except OSError as error:
        why = error.strerror or str(error)
        raise CannotBeMade(f"{path} cannot be made: {why} (XDG_CACHE_HOME names another place for it)") from error


def _made_once(path: Path, make: Callable[[Path, Path], None], progress: OnProgress) -> Path:
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.parent / f".{path.name}.lock", f"waiting for another process that makes {path.name}", progress):
        if path.is_dir():
            return path
        prefix = f".partial-{path.name}-"
        for leftover in path.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent, ignore_cleanup_errors=True) as partial:
            scratch, out = Path(partial) / "scratch", Path(partial) / "out"
            scratch.mkdir()
            out.mkdir()
            make(scratch, out)
            os.replace(out, path)
    return path


def convert_gguf(gguf: Path, out: Path, *, dtype: str, progress: OnProgress) -> None:
    """Fills the directory `out` from a GGUF file: config, tokenizer, and safetensors in `dtype`.

    Raises StartupError with a one-line message. A separate process converts, so that its memory and output end with it,
    and Ctrl-C stops it at once.
    """
    stage = f"converting {gguf.name} to {dtype}"
    progress(stage, 0, 0)
    error = run_python(["-m", "common.gguf.convert", str(gguf), str(out), dtype])
    if error is not None:
        check_disk(error)
        raise StartupError(f"{gguf.name} could not be converted: {error.splitlines()[-1]}")
    progress(stage, 1, 1)


def check_disk(output: str) -> None:
    """Raises OSError if a process says in its output that the disk, or its user's part of it, is full."""
    for code in (errno.ENOSPC, errno.EDQUOT):
        if (why := os.strerror(code)) in output:
            raise OSError(code, why)


@contextmanager
def full_disk_named() -> Iterator[None]:
    """Makes an OSError of a library's own error if that says that the disk is full."""
    try:
        yield
    except Exception as error:
        check_disk(str(error))
        raise


def run_python(
    arguments: list[str], *, environment: dict[str, str] | None = None, on_wait: Callable[[], None] | None = None
) -> str | None:
    """Runs this Python interpreter with `arguments` as a process, and waits for its end.

    Returns None on success, else the process's output, or its exit status in words if it wrote nothing. Meanwhile
    `on_wait` is called every 0.2 s, and may raise to end the process. The process does not outlive this call.
    """
    with Child(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,  # a file might not fit the disk
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
    ) as process:
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=_POLL_INTERVAL_S)
                    break
                except subprocess.TimeoutExpired:
                    if on_wait is not None:
                        on_wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode == 0:
        return None
    return output.decode(errors="replace").strip() or f"exit status {process.returncode}"


@contextmanager
def _lock(path: Path, waiting: str, progress: OnProgress) -> Iterator[None]:
    """Holds an exclusive lock on a file inside this context. The system releases it if this process dies.

    While another process holds it, `progress` is called with `waiting` as the stage, and may raise to end the wait.
    """
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(waiting, 0, 0)  # called at each poll, so that it can raise to end the wait
                time.sleep(_POLL_INTERVAL_S)
        yield
