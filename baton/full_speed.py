"""Waits until services on CPUs have fused their forwards, by their metrics pages: figures taken earlier are too low."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Sequence

_POLL_INTERVAL_S = 0.2
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # services on this machine


def are_fused(metrics_addresses: Sequence[str]) -> bool:
    """Whether all services have fused forwards. Raises OSError, with the page's address, when one does not answer."""
    return all(_is_fused(f"http://{address}/metrics") for address in metrics_addresses)


def await_fused(metrics_addresses: Sequence[str], *, timeout_s: float) -> bool:
    """Returns False after `timeout_s`. Raises OSError like `are_fused`."""
    deadline_s = time.monotonic() + timeout_s
    while not are_fused(metrics_addresses):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_INTERVAL_S)
    return True


def _is_fused(url: str) -> bool:
    try:
        with _OPENER.open(url, timeout=5) as answer:
            return b"\nbaton_fused 1.0" in answer.read()
    except urllib.error.HTTPError as refusal:
        refusal.close()
        raise OSError(f"{url}: {refusal.code} {refusal.reason}") from None
    except urllib.error.URLError as error:
        raise OSError(f"{url}: {getattr(error.reason, 'strerror', None) or error.reason}") from None
