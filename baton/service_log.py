"""Turns a service's log into words for whoever started it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TAIL_BYTES = 64 << 10
_PROGRESS: Mapping[str, str] = {
    "preparing_model": "{stage}",
    "loading_model": "loads the model",
    "loading_draft": "loads the draft head",
    "pool_sized": "has room for {max_rows} requests with {max_kv_tokens} tokens of KV in all",
    "no_draft_head": "has no draft head: tokens come one a forward",
    "forwards_recorded": "recorded {num_graphs} forwards in {seconds} s",
    "cpu_engine_unavailable": "serves by PyTorch's operators: {reason}",
    "compiling_kernels": "compiles kernels, once on this machine; it serves meanwhile, slower",
    "fused_forward_unavailable": "serves by operators: {reason}",
    "fused_forward_ready": "is at full speed",
}
_FAILURES = ("error", "critical")


class ServiceLog:
    """Follows a growing file from its present end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def new_words(self) -> list[str]:
        """Returns the words of new lines since the last call, without lines that say nothing to people."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, _, _ = file.read().rpartition(b"\n")
        if not whole:
            return []
        self._offset += len(whole) + 1
        said = map(_words, whole.decode(errors="replace").splitlines())
        return [words for words in said if words]


def log_tail(path: Path, *, start: int = 0) -> str:
    """The end of the file, from byte `start` at the earliest."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").strip()


def why_it_ended(tail: str) -> str:
    """The last line of a log that tells a failure: a line of the log at such a level, or one that is not of the log.

    "" when there is none: the process was ended from outside, in the middle of its work. An engine that stood still and
    went on has not failed.
    """
    went_on = False
    for text in reversed(tail.splitlines()):
        line = _parsed(text)
        if line is None:
            return text.strip()
        went_on = went_on or line.get("event") == "engine_moves_again"
        if went_on and line.get("event") == "engine_stalled":
            continue
        if line.get("level") in _FAILURES:
            return str(line.get("error") or line.get("reason") or line["event"])
    return ""


def _words(text: str) -> str:
    line = _parsed(text)
    if line is None:
        return ""
    if line.get("level") in _FAILURES:
        error = line.get("error")
        return f"{line['event']}: {error}" if error else str(line["event"])
    try:
        return _PROGRESS.get(str(line["event"]), "").format_map(line)
    except LookupError:
        return ""


def _parsed(text: str) -> dict[str, Any] | None:
    """Returns None for text that is not a log line."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "event" in line else None
