"""Runs a server in another process for as long as a benchmark needs it."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

import structlog

from common.host.cores import switch_threads_early
from common.host.memory import keep_freed_memory

_START_TIMEOUT_S = 60.0

Serve = Callable[[Connection], Coroutine[None, None, None]]
"""A server that runs in the other process.

It sends its port through the pipe, serves until the pipe is closed or it is cancelled, and leaves nothing running.
"""


@contextmanager
def peer_process(serve: Serve) -> Iterator[str]:
    """Runs `serve` in another process and yields its address on loopback."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=_run, args=(serve, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_TIMEOUT_S):
            raise TimeoutError("a process of the benchmark did not start")
        yield f"127.0.0.1:{ours.recv()}"
    finally:
        ours.close()
        process.join(10.0)
        process.kill()


def _run(serve: Serve, pipe: Connection) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    keep_freed_memory()
    switch_threads_early()
    with suppress(KeyboardInterrupt):  # the benchmark's own process reports it
        asyncio.run(serve(pipe))


async def until_closed(pipe: Connection) -> None:
    closed = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), closed.set)
    await closed.wait()
