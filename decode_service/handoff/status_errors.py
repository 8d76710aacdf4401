"""Translates the gRPC status of a failed Handoff call into the error with which its rows are lost."""

from __future__ import annotations

from typing import cast

import grpc
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from common.errors import BatonError, EngineFault, FingerprintMismatch, PrefillUnavailable
from common.peer_text import peer_text
from common.rpc.errors import connection_words

# Without an ErrorInfo the connection or the peer's process is at fault, not the rows: another replica may serve.
_PEER_LOST = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
    }
)
# UNIMPLEMENTED: the process at this address is a decode service now.
_PEER_REFUSES = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED}
)


def error_of_status(replica: str, failure: grpc.aio.AioRpcError) -> BatonError:
    """Returns FingerprintMismatch, PrefillUnavailable or EngineFault, depending on the status code and the ErrorInfo.

    gRPC reports a message above the size limit as RESOURCE_EXHAUSTED without an ErrorInfo. That becomes an EngineFault,
    because the message would be too large for any replica.
    """
    code, info = failure.code(), error_info(failure)
    details = failure.details() or ""
    message = f"{replica}: {code.name}: {peer_text(details if info else connection_words(details))}"
    if info is None:
        return PrefillUnavailable(message) if code in _PEER_LOST else EngineFault(message)
    if info.reason == FingerprintMismatch.reason:
        told = {key: peer_text(info.metadata[key]) for key in ("field", "decode", "prefill") if key in info.metadata}
        return FingerprintMismatch(
            told.get("field", "a field"), told.get("decode", "one value"), told.get("prefill", "another")
        )
    return PrefillUnavailable(message) if code in _PEER_REFUSES else EngineFault(message)


def error_info(failure: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo | None:
    """Returns the status's ErrorInfo, or None if it has none or its details belong to another status."""
    try:
        status = rpc_status.from_call(cast(grpc.Call, failure))
    except ValueError:
        return None
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return info
    return None
