"""Host memory whose pages the operating system provides when they are first used, or in the background.

Clearing a page of 4 KiB takes 0.25 to 1 us, and some 14 us in a virtual machine whose host must provide it first. For
all pages of a KV pool this adds up to seconds. Neither start-up nor requests should wait that long.
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

MADV_POPULATE_WRITE = 23  # from mman.h, since Linux 5.14
_POPULATED_BYTES = 1 << 20  # per call: other threads cannot change the process's memory map meanwhile
ASKED_BYTES = 64 << 20


def untouched_zeros(num_bytes: int, *, in_large_pages: bool = False) -> Tensor:
    """Returns zeros, [num_bytes] uint8, whose pages the system provides when each is first used.

    The memory starts at a page boundary. `in_large_pages` asks for large pages if the system has them: use it for
    memory that is read from one end to the other. Raises OSError if not enough memory is available.
    """
    require_room(num_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has other rules
    if in_large_pages and hasattr(mmap, "MADV_HUGEPAGE"):  # only on Linux
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def populate(memory: Tensor, check: Callable[[], None]) -> None:
    """Makes the system provide all pages of `memory` now. `memory` comes from `untouched_zeros`.

    The contents do not change, and other threads may read and write them meanwhile. `check` is called between parts and
    may raise, to stop it. Raises OSError if the system cannot do it (Linux before 5.14) or the rest does not fit into
    the available memory. Then each remaining page is provided when it is first used.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"not known of {sys.platform}")
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_bytes = memory.nbytes
    for start in range(0, num_bytes, _POPULATED_BYTES):
        check()
        if start % ASKED_BYTES == 0:
            require_room(num_bytes - start)
        part = min(_POPULATED_BYTES, num_bytes - start)
        if madvise(memory.data_ptr() + start, part, MADV_POPULATE_WRITE) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
