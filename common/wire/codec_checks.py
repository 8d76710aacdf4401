"""What every decoder uses to refuse bytes that break the protocol."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from common.peer_text import peer_text

MessageT = TypeVar("MessageT", bound=Message)


class ProtocolError(Exception):
    """The peer sent what the protocol forbids. `field` is the path of the offending field. Both are peer_text."""

    def __init__(self, field: str, message: str) -> None:
        self.field = peer_text(field)
        self.message = peer_text(message)
        super().__init__(self.field, self.message)

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise ProtocolError(field, message)


def parse(kind: type[MessageT], data: bytes) -> MessageT:
    """The message in `data`. Raises ProtocolError when it holds none of this kind."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise ProtocolError(kind.DESCRIPTOR.name, f"not a message of this kind ({error})") from error
