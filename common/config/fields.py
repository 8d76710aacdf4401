"""The types of values that settings have, with their validation."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

from common.addresses import host_and_port, is_name, parse_name
from common.rpc.grpc_options import MAX_MESSAGE_BYTES, MAX_SEGMENT_BYTES

_WEIGHT = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


def _address(value: str) -> str:
    host_and_port(value)
    return value


def _target(value: str) -> str:
    """Validates the address of one server, "HOST:PORT", or the name of several: "dns:///NAME:PORT" for all servers that
    a name resolves to, "file:///PATH" for all that a file lists.
    """
    return str(parse_name(value)) if is_name(value) else _address(value)


def _endpoint(value: str) -> str:
    scheme, separator, address = value.partition("://")
    if scheme not in ("http", "https") or not separator:
        raise ValueError(f"{value!r} is not http://HOST:PORT or https://HOST:PORT")
    _address(address.removesuffix("/"))
    return value


def _origin(value: str) -> str:
    """Validates an origin in the form that browsers send, or "*". Returns it in lower case."""
    if value != "*" and not _ORIGIN.fullmatch(value.lower()):
        raise ValueError(f"{value!r} is neither an origin, SCHEME://HOST or SCHEME://HOST:PORT, nor *")
    return value.lower()


def split_on_commas(value: Any) -> Any:
    """Returns a tuple of texts from a text with commas, or from a list of such texts. Other values stay unchanged.

    "a,b", ["a,b", "c"] and ["a", "b", "c"] are all accepted.
    """
    if not isinstance(value, str | list | tuple):
        return value
    items = [value] if isinstance(value, str) else value
    return tuple(part.strip() for item in items for part in str(item).split(",") if part.strip())


def _weight(value: str) -> str:
    name, _, weight = value.rpartition("=")
    if not name.strip() or not _WEIGHT.fullmatch(weight) or not float(weight):
        raise ValueError(f"{value!r} is not NAME=WEIGHT with a weight above 0")
    return value


def _once(weights: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the weights. Raises ValueError if a name has two."""
    names = [weight.rpartition("=")[0] for weight in weights]
    if len(set(names)) < len(names):
        raise ValueError("a name has two weights")
    return weights


def _device(value: str) -> str:
    if not re.fullmatch(r"(cpu|cuda)(:[0-9]{1,3})?", value):
        raise ValueError(f"{value!r} is neither cpu, cuda nor cuda:<index>")
    return value


DeviceName = Annotated[str, AfterValidator(_device)]
Address = Annotated[str, AfterValidator(_address)]
OptionalAddress = Annotated[str, AfterValidator(lambda value: _address(value) if value else value)]
OptionalEndpoint = Annotated[str, AfterValidator(lambda value: _endpoint(value) if value else value)]
Addresses = Annotated[tuple[Address, ...], NoDecode, BeforeValidator(split_on_commas)]
Origins = Annotated[tuple[Annotated[str, AfterValidator(_origin)], ...], NoDecode, BeforeValidator(split_on_commas)]
Targets = Annotated[tuple[Annotated[str, AfterValidator(_target)], ...], NoDecode, BeforeValidator(split_on_commas)]
Names = Annotated[
    tuple[str, ...],
    NoDecode,
    BeforeValidator(split_on_commas),
    AfterValidator(lambda names: tuple(dict.fromkeys(names))),
]
Weights = Annotated[
    tuple[Annotated[str, AfterValidator(_weight)], ...],
    NoDecode,
    BeforeValidator(split_on_commas),
    AfterValidator(_once),
]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeSeconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Choices = Annotated[int, Field(ge=1, le=128)]
RequestBytes = Annotated[int, Field(ge=64 << 10, le=MAX_MESSAGE_BYTES)]
SegmentBytes = Annotated[int, Field(ge=64 << 10, le=MAX_SEGMENT_BYTES)]
