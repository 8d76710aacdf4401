"""Turns a service's log lines into text for the user who started the service."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

TAIL_BYTES = 64 << 10
_WORDS: Mapping[str, str] = {
    "preparing_model": "{stage}",
    "loading_model": "loads the model",
    "loading_draft": "loads the draft head",
    "pool_sized": "has room for {max_rows} requests with {max_kv_tokens} tokens of KV in all",
    "pool_shortens_context": "takes no request of more than {max_context_tokens} tokens: for the {allowed_tokens} that "
    "the model and max_context_tokens allow, max_kv_tokens must be {needed_kv_tokens}",
    "no_draft_head": "has no draft head: tokens come one a forward",
    "forwards_recorded": "recorded {num_graphs} forwards in {seconds} s",
    "cpu_engine_unavailable": "serves by PyTorch's operators: {reason}",
    "compiling_kernels": "compiles kernels, once on this machine; it serves meanwhile, slower",
    "fused_forward_unavailable": "serves by PyTorch's operators: {reason}",
    "fused_forward_failed": "serves by PyTorch's operators: {error}",
    "fused_forward_ready": "is at full speed",
    "engine_stalled": "stalls: {part} has not moved for {still_s} s",
    "engine_moves_again": "goes on: {part} moves again, after {still_s} s",
}
_LAST = "critical"
"""The log level of a process's last error, which is reported with its end."""
_FAILURES = ("error", _LAST)


class ServiceLog:
    """Reads the lines that are appended to a log file after this object was made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def new_words(self) -> list[str]:
        """Returns the text for each new log line since the last call. Lines that do not concern a user are left out."""
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
    """Returns the last TAIL_BYTES of the file, but nothing before byte `start`."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(start, path.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").strip()


def serving_port(tail: str) -> int | None:
    """Returns the port that the service listens on, from the end of its log; None before it listens."""
    for text in tail.splitlines():
        line = _parsed(text)
        if line is not None and line["event"] == "serving":
            return int(line["port"])
    return None


def why_it_ended(tail: str) -> str:
    """Returns why a process failed, from the end of its log; "" if the log does not say.

    The reason is taken from the last line that is an error, or is no log line, such as a traceback's. An
    `engine_stalled` error does not count if the engine moved again later.
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
    event = str(line["event"])
    with suppress(LookupError):
        return _WORDS[event].format_map(line)
    if line.get("level") not in _FAILURES or line["level"] == _LAST:
        return ""
    error = line.get("error")
    return f"{event}: {error}" if error else event


def _parsed(text: str) -> dict[str, Any] | None:
    """Parses a log line. Returns None if the text is not one."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "event" in line else None
