"""Programs that are run to their end, within a time."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_TAIL_CHARS = 3000
_POLL_INTERVAL_S = 0.5


class CommandFailed(Exception):
    """A program ended with another status than 0, or not in time: what it was and what it said last."""


def run(
    command: Sequence[str],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> str:
    """Its standard output. Raises CommandFailed."""
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise CommandFailed(f"{command[0]}: is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{' '.join(command)}: not done after {timeout_s:.0f} s") from error
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-_TAIL_CHARS:].strip()
        raise CommandFailed(f"{' '.join(command)}: exit status {done.returncode}\n{said}")
    return done.stdout


def succeeds(command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None) -> bool:
    try:
        run(command, timeout_s=timeout_s, environment=environment)
    except CommandFailed:
        return False
    return True


def wait_until(what: str, is_so: Callable[[], bool], *, timeout_s: float) -> None:
    """Asks until it is so. Raises TimeoutError naming what was waited for."""
    end_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what}: not after {timeout_s:.0f} s")
        time.sleep(_POLL_INTERVAL_S)
