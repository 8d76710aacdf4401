"""How long a thread of a service may keep the interpreter's lock from another that waits for it."""

from __future__ import annotations

import sys

_SWITCH_INTERVAL_S = 0.0005


def hand_over_early() -> None:
    """A thread that comes back from a kernel waits for the lock while another runs Python: five milliseconds by
    Python's default, as long as the kernel may have taken.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
