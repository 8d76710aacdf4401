"""Host memory that is freed stays with the process: KV segments come and go by the hundred each second.

The C library would return each segment's 8 MiB to the system and ask for them again, page by page: half the time of
sending over gRPC.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_LARGEST_THRESHOLD_BYTES = 32 << 20  # beyond it glibc refuses
_KEPT_BYTES = 512 << 20


def keep_freed_memory() -> None:
    """For the whole process. Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
