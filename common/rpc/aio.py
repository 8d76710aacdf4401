"""What Baton works around in grpcio's asyncio: how it wakes the loop, and what a cancelled read leaves behind.

grpc.aio's thread writes a byte to a socket for each operation that completes (a message written, a message read), and
the loop's callback reads one byte and then handles all that have completed. So with asyncio's own loop each completion
costs a whole iteration of the loop, and a loop with long iterations falls behind: when some 280 bytes lie in the
socket, gRPC's thread waits, and from then on one operation completes in each iteration. `EventLoop` handles in one
iteration all operations whose bytes lie there. (Seen with grpcio 1.85.)

grpcio never frees the message that arrives for a read whose task was cancelled (grpc/grpc#43360): in the decode service
up to a whole frame of KV for each call that is broken off. So a cancelled task lets the read go on (`whole_read`), and
ends the call; that ends the read.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_GRPC_MODULE = "grpc._cython.cygrpc"
_MOST_BYTES = 1 << 16


class EventLoop(asyncio.SelectorEventLoop):
    """asyncio's loop, except for the sockets by which gRPC wakes it."""

    def add_reader(self, fd: Any, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        if isinstance(fd, socket.socket) and _is_grpcs(callback):
            super().add_reader(fd, partial(_handle_each, fd, partial(callback, *args)))
        else:
            super().add_reader(fd, callback, *args)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` as `asyncio.run` does, on an `EventLoop`."""
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        return runner.run(main)


def _is_grpcs(callback: Callable[..., Any]) -> bool:
    function = callback.func if isinstance(callback, partial) else callback
    return type(getattr(function, "__self__", function)).__module__ == _GRPC_MODULE


def _handle_each(wakes: socket.socket, handle: Callable[[], Any]) -> None:
    """Calls `handle`, which reads one byte and handles what has completed by then, once for each byte that has come.

    All loops of a process that use gRPC are woken by the same socket. So another loop may have read bytes that this one
    was told of, and handled their operations. No byte is read here, because the byte of an operation that completes
    meanwhile would be lost.
    """
    with suppress(BlockingIOError):
        for _ in wakes.recv(_MOST_BYTES, socket.MSG_PEEK):
            handle()


def begin_read(reading: Awaitable[T]) -> asyncio.Future[T]:
    """Starts `reading`, a read of a grpc.aio stream, and returns its future. If nobody waits for the future any more,
    the read ends with its call, and its error is not reported.
    """
    future = asyncio.ensure_future(reading)
    future.add_done_callback(_retrieve_error)
    return future


async def whole_read(reading: Awaitable[T]) -> T:
    """Returns the message that `reading` returns. If the caller is cancelled, the read goes on until its call ends."""
    return await asyncio.shield(begin_read(reading))


def _retrieve_error(future: asyncio.Future[T]) -> None:
    """Retrieves the error of an ended read, because asyncio reports errors that nobody retrieved."""
    if not future.cancelled():
        future.exception()
