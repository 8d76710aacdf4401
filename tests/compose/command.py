"""Runs programs to their end, with a time limit."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_TAIL_CHARS = 3000
_POLL_INTERVAL_S = 0.5


class CommandFailed(Exception):
    """Raised when a program fails or takes too long. The text names the command and its last output."""


def run(
    command: Sequence[str],
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> str:
    """Runs a command and returns its standard output. Raises CommandFailed if it fails or takes longer than
    `timeout_s`.
    """
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


def succeeds(command: Sequence[str], *, timeout_s: float) -> bool:
    try:
        run(command, timeout_s=timeout_s)
    except CommandFailed:
        return False
    return True


def wait_until(what: str, is_so: Callable[[], bool], *, timeout_s: float) -> None:
    """Polls until `is_so()` is True. Raises TimeoutError after `timeout_s`, with `what`, the description of what was
    awaited.
    """
    end_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what}: not after {timeout_s:.0f} s")
        time.sleep(_POLL_INTERVAL_S)
