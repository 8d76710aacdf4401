"""The time-outs of everything that waits for a prefill replica."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTimeouts:
    """Time-outs and intervals of the handoff, in seconds.

    A call is lost if it has no connection within `connect_timeout_s`, no Accepted frame within `accept_timeout_s` after
    that, or no further frame within `progress_timeout_s`. Each replica is polled every `poll_interval_s`; a request of
    a poll fails after `poll_timeout_s`. Each DNS name is looked up every `look_up_interval_s`; a look-up fails after
    `look_up_timeout_s`. Each NIXL operation (reading a segment, or starting the process) fails after `nixl_timeout_s`.
    After a failure the pool is opened again after `nixl_retry_s`, a wait that doubles with each failure in a row.
    Closing waits for at most `close_timeout_s`.
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
        """Returns time-outs whose `progress_timeout_s` is `timeout_s`.

        `accept_timeout_s` and `nixl_timeout_s` are the same, but 10 s at most: neither waits for the replica's engine.
        """
        short_s = min(10.0, timeout_s)
        return cls(accept_timeout_s=short_s, nixl_timeout_s=short_s, progress_timeout_s=timeout_s)
