"""Waits until services on CPUs run fused forwards: the whole model as one compiled program.

A service compiles that program while it already serves, so speeds measured earlier are too low. Its metrics page says
whether it runs fused forwards yet.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Sequence

_POLL_INTERVAL_S = 0.2
# Bypasses any proxy, because the services run on this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def are_fused(metrics_addresses: Sequence[str]) -> bool:
    """Returns whether all services run fused forwards (the whole model as one program). Each address is that of a
    service's metrics page.

    Raises OSError, which names the page, if a page does not answer.
    """
    return all(_is_fused(f"http://{address}/metrics") for address in metrics_addresses)


def await_fused(metrics_addresses: Sequence[str], *, timeout_s: float) -> bool:
    """Waits until all services run fused forwards (the whole model as one program). Returns False if `timeout_s` passes
    first.

    Raises OSError, which names the page, if a metrics page does not answer.
    """
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
    except OSError as error:  # of reading the answer, which urllib does not wrap
        raise OSError(f"{url}: {error}") from None
