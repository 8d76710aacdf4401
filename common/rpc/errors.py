"""How a BatonError travels as a gRPC status with google.rpc.ErrorInfo."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from common.errors import BatonError
from common.peer_text import peer_text

ERROR_DOMAIN = "baton"
STATUS_TIMEOUT_S = 2.0
_MAX_MESSAGE_BYTES = 1024


def status_of(error: BatonError) -> status_pb2.Status:
    """The status, cut to what gRPC is sure to carry: a peer drops trailers above 8 KiB, and the code with them."""
    detail = any_pb2.Any()
    metadata = {key: peer_text(value) for key, value in error.metadata.items()}
    detail.Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=metadata))
    code: int = grpc.StatusCode[error.code].value[0]
    return status_pb2.Status(code=code, message=peer_text(str(error), _MAX_MESSAGE_BYTES), details=[detail])


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """End the call with `error`, in time as cancelled: a peer that reads nothing takes no status either.

    gRPC keeps the stream of such a peer, a few KiB, until its connection ends; the handler is over.
    """
    status = rpc_status.to_status(status_of(error))
    trailing_metadata = tuple(status.trailing_metadata or ())
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            await context.abort(status.code, status.details or "", trailing_metadata)
    except TimeoutError:
        raise asyncio.CancelledError from None
    raise AssertionError("abort returned")
