"""When a decode service on CPUs has its forwards fused, by its metrics page: figures taken earlier are not its own."""

from __future__ import annotations

import time
import urllib.request

_POLL_INTERVAL_S = 0.2


def is_fused(metrics_address: str) -> bool:
    """Raises OSError where there is no metrics page."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=5) as answer:
        return b"\nbaton_fused 1.0" in answer.read()


def await_fused(metrics_address: str, *, timeout_s: float) -> bool:
    """False when it took longer than `timeout_s`. Raises OSError as above."""
    deadline_s = time.monotonic() + timeout_s
    while not is_fused(metrics_address):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_INTERVAL_S)
    return True
