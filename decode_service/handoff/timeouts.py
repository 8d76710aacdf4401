"""Every bound on waiting for a prefill replica."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTimeouts:
    """A call is lost when no connection, no Accepted, or no frame while we were ready to read one, comes in time.

    Each replica is looked at every `poll_interval_s`, each look bounded by `poll_timeout_s`; each name is looked up
    every `look_up_interval_s`, and has failed when there is no answer within `look_up_timeout_s`. Each step of NIXL's,
    a read of one segment or its process's start, ends within `nixl_timeout_s`; what failed is tried again after
    `nixl_retry_s`, each time twice as long.
    """

    connect_timeout_s: float = 2.0
    accept_timeout_s: float = 10.0
    progress_timeout_s: float = 120.0
    poll_interval_s: float = 0.5
    poll_timeout_s: float = 2.0
    look_up_interval_s: float = 2.0
    look_up_timeout_s: float = 5.0
    nixl_timeout_s: float = 10.0
    nixl_retry_s: float = 5.0
    close_timeout_s: float = 5.0

    @classmethod
    def of_progress(cls, timeout_s: float) -> HandoffTimeouts:
        """Accepted and reads, which need no engine, have no more time than other frames."""
        short_s = min(10.0, timeout_s)
        return cls(accept_timeout_s=short_s, nixl_timeout_s=short_s, progress_timeout_s=timeout_s)
