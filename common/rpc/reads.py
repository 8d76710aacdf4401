"""Reads from a gRPC stream that a cancellation does not interrupt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Message = TypeVar("Message")


async def whole_read(reading: Awaitable[Message]) -> Message:
    """Returns the message that `reading`, a read of a grpc.aio stream, returns.

    If the caller is cancelled, the read goes on until its call ends, so whoever cancels must also end the call. grpcio
    never frees the message that arrives for a cancelled read (grpc/grpc#43360): in the decode service up to a whole
    frame of KV for each call that is broken off.
    """
    return await asyncio.shield(reading)
