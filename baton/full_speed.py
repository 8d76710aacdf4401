"""When services on CPUs have their forwards fused, by their metrics pages: figures taken earlier are not their own."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Sequence

_POLL_INTERVAL_S = 0.2
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # services on this machine


def are_fused(metrics_addresses: Sequence[str]) -> bool:
    """All of them. Raises OSError where there is no metrics page."""
    return all(_is_fused(address) for address in metrics_addresses)


def await_fused(metrics_addresses: Sequence[str], *, timeout_s: float) -> bool:
    """False when it took longer than `timeout_s`. Raises OSError as above."""
    deadline_s = time.monotonic() + timeout_s
    while not are_fused(metrics_addresses):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_INTERVAL_S)
    return True


def _is_fused(metrics_address: str) -> bool:
    with _OPENER.open(f"http://{metrics_address}/metrics", timeout=5) as answer:
        return b"\nbaton_fused 1.0" in answer.read()
