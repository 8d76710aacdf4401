"""The gateway's errors: OpenAI's and Anthropic's error objects, and the HTTP status for each BatonError.

ApiError     the request is answered with an error
ClientLeft   the client has left, so nothing can be answered
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, TypeVar

import grpc

from baton.errors import QUEUE_FULL, BatonError, DeadlineExceeded, Unavailable
from common.peer_text import peer_text

AnswerT = TypeVar("AnswerT")
INVALID_REQUEST = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
SERVER_ERROR = "server_error"
CLIENT_LEFT_STATUS = 499
"""The status of a request whose client left. It appears in metrics and logs only."""
_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: RATE_LIMIT,
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error types of the Messages API, by HTTP status. Other statuses mean `invalid_request_error`, or `api_error` from 500
on.
"""
_CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
_RETRY_AFTER_S = 1
_MAX_MESSAGE_BYTES = 1024
_MAX_SHOWN_CHARS = 64
_CONTEXT_EXCEEDED = "CONTEXT_EXCEEDED"


class ApiError(Exception):
    """An error that is sent to the client as the answer.

    `param` names the field of the HTTP request. `retry_after_s` becomes a Retry-After header, in addition to `headers`.
    In the Messages API, `messages_text` replaces the message, and the answer also has `details`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
        messages_text: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(peer_text(message, _MAX_MESSAGE_BYTES))
        self.status = status
        self.kind = kind
        self.param = None if param is None else peer_text(param)
        self.code = code
        self.retry_after_s = retry_after_s
        self.messages_text = messages_text or str(self)
        self.details = details
        self._headers = dict(headers or {})

    @property
    def headers(self) -> dict[str, str]:
        retry = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return {**self._headers, **retry}


class ClientLeft(Exception):
    """The HTTP client closed its connection, or read nothing for too long."""


def openai_error(error: ApiError) -> Mapping[str, Any]:
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


def messages_error(error: ApiError, request_id: str) -> Mapping[str, Any]:
    """Returns an error as Anthropic's Messages API writes it."""
    kind = _MESSAGES_KINDS.get(error.status, INVALID_REQUEST if error.status < 500 else "api_error")
    told = {"type": kind, "message": error.messages_text, "details": error.details}
    return {"type": "error", "error": told, "request_id": request_id}


def invalid(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """Returns the error for a wrong field, with status 400."""
    return ApiError(400, message if param is None else f"{param}: {message}", param=param, code=code)


def none_of(param: str, value: object, allowed: Iterable[str]) -> ApiError:
    """Returns the error for a value that is none of the `allowed` texts."""
    return invalid(param, f"{f'{shown(value)} ' if shown(value) else ''}is none of {', '.join(allowed)}")


def shown(value: object) -> str:
    """Returns a wrong value as JSON for an error message; "" if it is long, or neither text nor number."""
    text = json.dumps(value) if isinstance(value, str | int | float) else ""
    return text if len(text) <= _MAX_SHOWN_CHARS else ""


def not_served(param: str, but: str = "") -> ApiError:
    """Returns the error for a field or value that is not supported. `but` names what is supported."""
    return invalid(param, f"is not served, {but}" if but else "is not served", code="unsupported_parameter")


def context_exceeded(
    param: str,
    *,
    prompt: str,
    max_context_tokens: int,
    num_prompt_tokens: int | None = None,
    max_tokens: int | None = None,
    message: str = "that is exceeded",
) -> ApiError:
    """Returns the error for a request that exceeds the model's context, with status 400.

    The text uses OpenAI's words, and in the Messages API Anthropic's, because client libraries recognise the error by
    them. `param` names the wrong field, and `prompt` the field that holds the prompt. `message` is part of the text if
    `num_prompt_tokens` is not known.
    """
    if num_prompt_tokens is None:
        what = message
        messages_text = f"prompt is too long: {message}" if param == prompt else ""
    elif max_tokens is None:
        what = f"your {prompt} resulted in {num_prompt_tokens} tokens, which leave no room for output"
        messages_text = f"prompt is too long: {num_prompt_tokens} tokens > {max_context_tokens} maximum"
    else:
        total = num_prompt_tokens + max_tokens
        what = f"you requested {total} tokens ({num_prompt_tokens} in the {prompt}, {max_tokens} in the completion)"
        numbers = f"{num_prompt_tokens} + {max_tokens} > {max_context_tokens}"
        messages_text = f"input length and `max_tokens` exceed context limit: {numbers}"
    text = (
        f"This model's maximum context length is {max_context_tokens} tokens. However, {what}. "
        f"Please reduce the length of the {prompt}{'' if max_tokens is None else ' or completion'}. "
        f"({_CONTEXT_LENGTH_EXCEEDED})"  # LangChain recognises the error by its message alone
    )
    return ApiError(400, text, param=param, code=_CONTEXT_LENGTH_EXCEEDED, messages_text=messages_text)


def _context_exceeded_of(error: BatonError, param: str, message: str, *, prompt: str) -> ApiError:
    names = ("max_context_tokens", "num_prompt_tokens", "max_tokens")
    tokens = {name: int(error.metadata[name]) for name in names if error.metadata.get(name, "").isdecimal()}
    # Missing if the prefill service has set the limit, or the decode service has another version.
    if "max_context_tokens" not in tokens:
        text = f"This model's maximum context length is exceeded: {message} ({_CONTEXT_LENGTH_EXCEEDED})"
        messages_text = f"prompt is too long: {message}"
        return ApiError(400, text, param=param, code=_CONTEXT_LENGTH_EXCEEDED, messages_text=messages_text)
    return context_exceeded(param, prompt=prompt, message=message, **tokens)


def overloaded(message: str, *, retry_after_s: int = _RETRY_AFTER_S) -> ApiError:
    return ApiError(429, message, kind=RATE_LIMIT, code="overloaded", retry_after_s=retry_after_s)


def unavailable(message: str, *, code: str = "unavailable") -> ApiError:
    return ApiError(503, message, kind=SERVER_ERROR, code=code, retry_after_s=_RETRY_AFTER_S)


def internal() -> ApiError:
    """Returns the error for a bug in the gateway. Details are in the log only."""
    return ApiError(500, "the gateway failed", kind=SERVER_ERROR, code="internal_error")


async def answer_of(call: Awaitable[AnswerT]) -> AnswerT:
    """Waits for the decode service's answer to a small call. Raises Unavailable in place of DeadlineExceeded, because
    the time of such a call is the gateway's: the HTTP request has no deadline.
    """
    try:
        return await call
    except DeadlineExceeded as error:
        raise Unavailable("it has not answered in time") from error


def api_error_of(error: BatonError, params: Mapping[str, str]) -> ApiError:
    """Converts a BatonError into an HTTP error.

    `params` maps a field's name in the gRPC request to its name in the HTTP request, where the two differ. The name of
    a list or entry also covers everything in it that has no own name. With a dot at its end, it covers what is in an
    entry and has the same name in both. A name may go on with a place that the message begins with.
    """
    message = str(error)
    match error.code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            field = error.field
            if field is None:
                return ApiError(400, message)
            whole, is_list, _ = field.partition("[")
            entry = f"{field.partition(']')[0]}]" if is_list else field
            moved = params.get(f"{entry}.")
            named = params.get(field) or (moved and f"{moved}{field.removeprefix(entry)}")
            named = named or params.get(entry) or params.get(whole)
            param = named or field.removeprefix("sampling.").removeprefix("chat.")
            message = message.removeprefix(f"{field}: ")
            place, _, why = message.partition(": ")
            if (own := params.get(f"{field}.{place}")) is not None:
                return invalid(own, why)
            if error.reason != _CONTEXT_EXCEEDED:
                return invalid(param, message)
            return _context_exceeded_of(error, param, message, prompt=params.get("prompt", "prompt"))
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            if error.reason == QUEUE_FULL:
                told_s = error.retry_after_s
                return overloaded(message, retry_after_s=_RETRY_AFTER_S if told_s is None else told_s)
            # gRPC refuses a message that is too large in this way.
            return ApiError(413, message, code="request_too_large")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return ApiError(504, message, kind=SERVER_ERROR, code="deadline_exceeded")
        case grpc.StatusCode.UNAVAILABLE:
            return unavailable(message if error.reason else f"the decode service cannot be reached: {message}")
        case grpc.StatusCode.FAILED_PRECONDITION:
            return ApiError(503, message, kind=SERVER_ERROR, code="services_disagree")
        case grpc.StatusCode.INTERNAL:
            return ApiError(500, message, kind=SERVER_ERROR, code="internal_error")
        case _:  # for example the decode service refused the gateway's own token, which no caller can fix
            return ApiError(502, f"decode service: {message}", kind=SERVER_ERROR, code="bad_gateway")
