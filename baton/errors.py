"""Every error that Baton's client and CLI raise.

BatonError                  carries the gRPC code, the ErrorInfo reason and its metadata
├── InvalidArgument         a field of the request is wrong: `field` names it
├── AlreadyExists           the request id is live
├── ResourceExhausted       admission is full: try again later
├── DeadlineExceeded        the deadline passed; the server has dropped the request
├── Cancelled               the stream was closed
├── FailedPrecondition      the services disagree about the model: `field` names the difference
├── Unavailable             no server can be reached, or it has no ready prefill replica
├── Unauthenticated
├── PermissionDenied
├── NotFound
├── Unimplemented           the server does not know the call
├── Internal                the server failed, or broke the protocol
└── LocalPairError          raised by `baton.local_pair` only
    ├── ServiceDied         a service process ended: the message says why
    ├── PairMismatch        the services cannot work together: the message names the difference
    └── StartTimedOut       a service did not become ready in time
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import grpc

from baton.service_log import why_it_ended
from common.peer_text import peer_text
from common.rpc.errors import connection_words, error_info

QUEUE_FULL = "QUEUE_FULL"
"""The reason of a refusal by a server that is full."""
_MAX_MESSAGE_BYTES = 1024
_LONGEST_S = 10**9


class BatonError(Exception):
    """The base of all errors. `reason` and `metadata` are those of the server's `google.rpc.ErrorInfo`, or empty if it
    sent none.
    """

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        code: grpc.StatusCode | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.metadata = dict(metadata or {})
        if code is not None:
            self.code = code

    @property
    def field(self) -> str | None:
        """The field of the request, or of the model's fingerprint, that the error is about; None if it names none."""
        return self.metadata.get("field")

    @property
    def retry_after_s(self) -> int | None:
        """The seconds after which a full server wants to be asked again; None if it names no time."""
        told = self.metadata.get("retry_after_s", "")
        return int(min(float(told), _LONGEST_S)) if told.isdecimal() else None


class InvalidArgument(BatonError):
    code = grpc.StatusCode.INVALID_ARGUMENT


class AlreadyExists(BatonError):
    code = grpc.StatusCode.ALREADY_EXISTS


class ResourceExhausted(BatonError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlineExceeded(BatonError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(BatonError):
    code = grpc.StatusCode.CANCELLED


class FailedPrecondition(BatonError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class Unavailable(BatonError):
    code = grpc.StatusCode.UNAVAILABLE


class Unauthenticated(BatonError):
    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(BatonError):
    code = grpc.StatusCode.PERMISSION_DENIED


class NotFound(BatonError):
    code = grpc.StatusCode.NOT_FOUND


class Unimplemented(BatonError):
    code = grpc.StatusCode.UNIMPLEMENTED


class Internal(BatonError):
    code = grpc.StatusCode.INTERNAL


class LocalPairError(BatonError):
    code = grpc.StatusCode.UNAVAILABLE


class ServiceDied(LocalPairError):
    """A service process has ended. `log_tail` is the end of its output."""

    reason_code: ClassVar[str] = "SERVICE_DIED"

    def __init__(self, name: str, returncode: int, log_tail: str, log_file: Path) -> None:
        how = f"ended with status {returncode}" if returncode >= 0 else f"was ended by {_signal_name(-returncode)}"
        why = why_it_ended(log_tail)
        super().__init__(
            f"{name} {how}{f': {why}' if why else ''}; its log: {log_file}",
            reason=self.reason_code,
            metadata={"service": name, "returncode": str(returncode)},
        )
        self.name = name
        self.returncode = returncode
        self.log_tail = log_tail


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class PairMismatch(LocalPairError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class StartTimedOut(LocalPairError):
    """Services were not ready in time.

    `waiting_for` maps the name of each service that is not ready to the known reason, or to "".
    """

    reason_code: ClassVar[str] = "START_TIMED_OUT"

    def __init__(self, waiting_for: Mapping[str, str], timeout_s: float, log_dir: Path) -> None:
        waiting = [f"{name} ({why})" if why else name for name, why in waiting_for.items()]
        super().__init__(
            f"not ready after {timeout_s:g} s: {', '.join(waiting)}; logs: {log_dir}", reason=self.reason_code
        )
        self.waiting_for = dict(waiting_for)


_KIND_BY_CODE: dict[grpc.StatusCode, type[BatonError]] = {
    kind.code: kind
    for kind in (
        InvalidArgument,
        AlreadyExists,
        ResourceExhausted,
        DeadlineExceeded,
        Cancelled,
        FailedPrecondition,
        Unavailable,
        Unauthenticated,
        PermissionDenied,
        NotFound,
        Unimplemented,
        Internal,
    )
}


def invalid_field(field: str, why: object) -> InvalidArgument:
    return InvalidArgument(f"{field}: {why}", reason="INVALID_FIELD", metadata={"field": field})


def error_from_rpc(rpc_error: grpc.RpcError) -> BatonError:
    """Converts the error of a failed call, blocking or asyncio, into the BatonError of its status code."""
    code: grpc.StatusCode = rpc_error.code()
    info = error_info(rpc_error)
    details = rpc_error.details() or code.name
    return _KIND_BY_CODE.get(code, BatonError)(
        peer_text(details if info else connection_words(details), _MAX_MESSAGE_BYTES),
        code=code,
        reason=peer_text(info.reason) if info else "",
        metadata={peer_text(key): peer_text(value) for key, value in info.metadata.items()} if info else None,
    )
