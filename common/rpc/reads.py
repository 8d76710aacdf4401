"""Reads from a gRPC stream that a cancellation does not interrupt.

grpcio never frees the message that arrives for a read whose task was cancelled (grpc/grpc#43360): in the decode service
up to a whole frame of KV for each call that is broken off. So whoever is cancelled lets the read go on, and ends the
call; that ends the read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Message = TypeVar("Message")


def begin_read(reading: Awaitable[Message]) -> asyncio.Future[Message]:
    """Starts `reading`, a read of a grpc.aio stream, and returns its future. If nobody waits for it any more, it ends
    with its call, and its error is not reported.
    """
    future = asyncio.ensure_future(reading)
    future.add_done_callback(_retrieve_error)
    return future


async def whole_read(reading: Awaitable[Message]) -> Message:
    """Returns the message that `reading` returns. If the caller is cancelled, the read goes on until its call ends."""
    return await asyncio.shield(begin_read(reading))


def _retrieve_error(future: asyncio.Future[Message]) -> None:
    """Retrieves the error of an ended read, because asyncio reports those that nobody retrieved."""
    if not future.cancelled():
        future.exception()
