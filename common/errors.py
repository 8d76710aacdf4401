"""The errors that a user can meet, as a tree.

BatonError
├── InvalidRequest         a field of the request is wrong; the message names it
│   └── ContextExceeded    prompt and output do not fit the context
├── DuplicateRequest       a request with this id is in progress
├── Overloaded             admission is full
├── RecordingInProgress    another caller records the service's timeline
├── RoleRefused            the process cannot have the role, or is changing to another
├── NotServed              this server does not serve the called method
├── Unauthenticated        the caller sent no valid token
├── DeadlineExceeded       the request's deadline passed
├── RequestCancelled       the client left or cancelled the request
├── FingerprintMismatch    the two services differ in a field, which the message names
├── PrefillUnavailable     no prefill replica could serve the request in time
├── Draining               the service is stopping
├── EngineFault            a step failed, or an invariant broke
├── EngineLost             the engine died; its process ends
│   └── EngineStalled      the engine made no progress for too long; its process ends
└── StartupError           raised before serving
    ├── ConfigError
    ├── UnsupportedModel
    └── DraftMismatch      a draft head does not fit its target or its own config
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class BatonError(Exception):
    """The base of all errors of this module.

    `code` is the name of the gRPC status code that carries the error, `reason` its ErrorInfo reason, and `metadata` its
    machine-readable detail.
    """

    code: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"

    @property
    def metadata(self) -> dict[str, str]:
        return {}

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(kind: type[BatonError], args: tuple[object, ...], state: dict[str, object]) -> BatonError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidRequest(BatonError):
    code = "INVALID_ARGUMENT"
    reason = "INVALID_FIELD"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message

    @property
    def metadata(self) -> dict[str, str]:
        return {"field": self.field}


class ContextExceeded(InvalidRequest):
    """Prompt and output do not fit the context. `tokens` states, as far as known, how many are allowed and
    requested.
    """

    reason = "CONTEXT_EXCEEDED"

    def __init__(self, field: str, message: str, **tokens: int) -> None:
        super().__init__(field, message)
        self.tokens = tokens

    @property
    def metadata(self) -> dict[str, str]:
        return {**super().metadata, **{name: str(number) for name, number in self.tokens.items()}}


class DuplicateRequest(BatonError):
    code = "ALREADY_EXISTS"
    reason = "DUPLICATE_REQUEST_ID"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request_id: {request_id!r} is already live")
        self.request_id = request_id

    @property
    def metadata(self) -> dict[str, str]:
        return {"field": "request_id", "request_id": self.request_id}


class Overloaded(BatonError):
    code = "RESOURCE_EXHAUSTED"
    reason = "QUEUE_FULL"

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def metadata(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry_after_s": str(self.retry_after_s)}


class RecordingInProgress(BatonError):
    code = "RESOURCE_EXHAUSTED"
    reason = "RECORDING_IN_PROGRESS"


class RoleRefused(BatonError):
    """The process cannot be given a role. `setting` names the setting that is missing, if that is why."""

    code = "FAILED_PRECONDITION"
    reason = "ROLE_REFUSED"

    def __init__(self, message: str, *, setting: str = "") -> None:
        super().__init__(f"{setting}: {message}" if setting else message)
        self.setting = setting

    @property
    def metadata(self) -> dict[str, str]:
        return {"field": self.setting} if self.setting else {}


class NotServed(BatonError):
    code = "UNIMPLEMENTED"
    reason = "NOT_SERVED"


class Unauthenticated(BatonError):
    code = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"

    @property
    def metadata(self) -> dict[str, str]:
        return {"field": "authorization"}


class DeadlineExceeded(BatonError):
    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE"


class RequestCancelled(BatonError):
    code = "CANCELLED"
    reason = "CANCELLED"


_ALIKE = {
    "protocol_version": "version of Baton",
    "config_digest": "model, and max_context_tokens if the values name a rotation",
    "target_weights_digest": "model",
    "tokenizer_digest": "model",
    "dtype": "dtype",
    "kv_dtype": "kv_dtype",
    "layer_groups": "draft",
    "draft_weights_digest": "draft",
    "algorithm": "draft",
    "seed_columns": "draft and draft_topk",
}
"""The setting that must be equal on both services, for each fingerprint field that depends on it. The dtype of a layer
group is that of KV.
"""


class FingerprintMismatch(BatonError):
    code = "FAILED_PRECONDITION"
    reason = "FINGERPRINT_MISMATCH"

    def __init__(self, field: str, ours: str, theirs: str) -> None:
        what = field.partition("[")[0] if not field.endswith("].dtype") else "kv_dtype"
        remedy = f"; give both the same {_ALIKE[what]}" if what in _ALIKE else ""
        super().__init__(f"fingerprints differ in {field}: decode has {ours}, prefill has {theirs}{remedy}")
        self.field = field
        self.ours = ours
        self.theirs = theirs

    @property
    def metadata(self) -> dict[str, str]:
        return {"field": self.field, "decode": self.ours, "prefill": self.theirs}


class PrefillUnavailable(BatonError):
    code = "UNAVAILABLE"
    reason = "NO_PREFILL"


class Draining(BatonError):
    code = "UNAVAILABLE"
    reason = "DRAINING"


class EngineFault(BatonError):
    code = "INTERNAL"
    reason = "ENGINE_FAULT"


class EngineLost(BatonError):
    code = "UNAVAILABLE"
    reason = "ENGINE_LOST"


class EngineStalled(EngineLost):
    reason = "ENGINE_STALLED"


class StartupError(BatonError):
    code = "FAILED_PRECONDITION"
    reason = "STARTUP"


class ConfigError(StartupError):
    """The configuration is wrong; the message names the key."""


class UnsupportedModel(StartupError):
    """The model has a trait that Baton does not serve; the message names it."""


class DraftMismatch(StartupError):
    """A draft head's config and tensors do not fit each other or the target. The message names key and directory."""


def request_reasons() -> list[str]:
    """Returns all reasons with which a request may end. Errors that occur only at start are not included."""

    def below(kind: type[BatonError]) -> list[type[BatonError]]:
        return [kind, *(each for child in kind.__subclasses__() for each in below(child))]

    unrelated = (StartupError, RecordingInProgress, RoleRefused, NotServed)
    return sorted({kind.reason for kind in below(BatonError) if not issubclass(kind, unrelated)})


class RowFailure(StrEnum):
    """Why a prefill replica gave up on a row. The values are the names in the wire's enum, without its prefix."""

    FINGERPRINT_MISMATCH = "FINGERPRINT_MISMATCH"
    INVALID_ROW = "INVALID_ROW"
    CAPACITY = "CAPACITY"
    CANCELLED = "CANCELLED"
    DEADLINE = "DEADLINE"
    DRAINING = "DRAINING"
    COMPUTE = "COMPUTE"
    STALLED = "STALLED"
    CONTEXT_EXCEEDED = "CONTEXT_EXCEEDED"
    CONSTRAINT = "CONSTRAINT"


ROW_FAILURE_ERRORS: dict[RowFailure, type[BatonError]] = {
    RowFailure.FINGERPRINT_MISMATCH: FingerprintMismatch,
    RowFailure.INVALID_ROW: EngineFault,
    RowFailure.CAPACITY: PrefillUnavailable,
    RowFailure.CANCELLED: RequestCancelled,
    RowFailure.DEADLINE: DeadlineExceeded,
    RowFailure.DRAINING: PrefillUnavailable,
    RowFailure.COMPUTE: EngineFault,
    RowFailure.STALLED: PrefillUnavailable,
    RowFailure.CONTEXT_EXCEEDED: ContextExceeded,
    RowFailure.CONSTRAINT: InvalidRequest,
}


def error_for_row_failure(reason: RowFailure, message: str, *, constraint_field: str = "sampling") -> BatonError:
    """Returns the error with which a request ends after a replica failed its row for good.

    `constraint_field` is the request's field that constrains its output.
    """
    kind = ROW_FAILURE_ERRORS[reason]
    if kind is FingerprintMismatch:
        return FingerprintMismatch(message or "fingerprint", "one value", "another")
    if kind is ContextExceeded:
        return ContextExceeded("prompt", message or "is longer than the prefill service takes")
    if kind is InvalidRequest:
        return InvalidRequest(constraint_field, message or "is not served")
    return kind(message or reason.value)
