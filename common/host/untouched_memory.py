"""Host memory that the system gives page by page, when it is touched or beside serving.

To clear a page of 4 KiB takes 0.25 to 1 us, and in a virtual machine whose host has to find it first some 14: for the
pages of a KV pool seconds, which neither a start nor requests should wait for.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from common.host.memory import require_room

_MADV_POPULATE_WRITE = 23  # of Linux 5.14's mman.h
_POPULATED_BYTES = 1 << 20  # at once: whoever changes the process's memory map waits for it
_ASKED_BYTES = 64 << 20


def untouched_zeros(num_bytes: int, *, in_large_pages: bool = False) -> Tensor:
    """[num_bytes] uint8, at the beginning of a page; the system gives each page when it is first touched.

    `in_large_pages`: where the system has them, for memory that is read from one end to the other. Raises OSError when
    the system has not so much left.
    """
    require_room(num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has other rules
    if in_large_pages and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux has it
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def populate(memory: Tensor, check: Callable[[], None]) -> None:
    """Touch all of `memory`, of `untouched_zeros`, without changing it: others may read and write there meanwhile.

    `check` is called between parts, and may raise. Raises OSError where the system cannot, as Linux before 5.14, or has
    less left than is still to come, others having taken it: then each page comes when it is used.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"not known of {sys.platform}")
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_bytes = memory.nbytes
    for start in range(0, num_bytes, _POPULATED_BYTES):
        check()
        if start % _ASKED_BYTES == 0:
            require_room(num_bytes - start)
        part = min(_POPULATED_BYTES, num_bytes - start)
        if madvise(memory.data_ptr() + start, part, _MADV_POPULATE_WRITE) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
