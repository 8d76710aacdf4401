"""What the services of a storm have logged."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from baton.service_process import ServiceProcess


def entries(services: Iterable[ServiceProcess], event: str) -> Iterator[tuple[ServiceProcess, dict[str, Any]]]:
    """The lines of an event, in order. One that a kill cut off in the middle is none."""
    for service in services:
        for line in service.log_file.read_text(errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(entry, dict) and entry.get("event") == event:
                yield service, entry
