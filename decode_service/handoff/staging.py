"""Staging memory that another process writes and this process reads, given out in ranges."""

from __future__ import annotations

import asyncio
import mmap
import os
import weakref
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray


class Staging:
    """Memory that another process writes and this one reads, given out in ranges.

    For the event loop only, but any thread may release a range.
    """

    def __init__(self, num_bytes: int) -> None:
        """Creates the memory. Raises OSError if it cannot. Pages that are never written use no memory."""
        self.num_bytes = num_bytes
        self.file = os.memfd_create("baton-staging")
        try:
            os.ftruncate(self.file, num_bytes)
            self._memory = mmap.mmap(self.file, num_bytes)
        except OSError:
            os.close(self.file)
            raise
        self._held: dict[int, int] = {}  # maps each held range's start to its stop
        self._came_back = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    async def take(self, num_bytes: int) -> tuple[int, NDArray[np.uint8]]:
        """Waits for a free range. Returns its offset and its memory [num_bytes].

        The range is released when nothing references the memory any more. Only one task may wait at a time.
        """
        assert num_bytes <= self.num_bytes, "there is never so much"
        while (start := self._first_fit(num_bytes)) is None:
            self._came_back.clear()
            await self._came_back.wait()
        self._held[start] = start + num_bytes
        taken = np.frombuffer(self._memory, np.uint8, num_bytes, start)  # views of the array reference it
        weakref.finalize(taken, self._come_back, start).atexit = False
        return start, taken

    def close(self) -> None:
        """Closes the memory's file, so that no further process can map it. Ranges given out stay valid."""
        os.close(self.file)

    def _first_fit(self, num_bytes: int) -> int | None:
        start = 0
        for held_start, held_stop in sorted(self._held.items()):
            if start + num_bytes <= held_start:
                break
            start = held_stop
        return start if start + num_bytes <= self.num_bytes else None

    def _come_back(self, start: int) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._give_back, start)

    def _give_back(self, start: int) -> None:
        del self._held[start]
        self._came_back.set()
