"""Reads the log lines of a storm's services."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from baton.service_process import ServiceProcess


def entries(services: Iterable[ServiceProcess], event: str) -> Iterator[tuple[ServiceProcess, dict[str, Any]]]:
    """Yields the services' log lines of an event, in order. A line that a kill cut off is skipped."""
    for service in services:
        for line in service.log_file.read_text(errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(entry, dict) and entry.get("event") == event:
                yield service, entry
