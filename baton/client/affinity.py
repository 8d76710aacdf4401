"""Remembers which server last had the beginning of a request, so that requests that begin alike can go to one server.

A server that computed a beginning probably has its KV cached. The client does not know the prompt's tokens, so it
compares bytes: of a chat's messages, of a text, or of token ids. Some positions of a request are marked. The bytes up
to a mark are a *beginning*, identified by their digest:

chat  | system | question | answer | question |     marks: ends of messages, and of blocks in long messages
text  |  block  |  block  |  block  |  rest         marks: ends of blocks

A mark depends only on the bytes before it. So two requests that begin with the same bytes have the same beginnings
there. A short message may end without a mark, except the last few messages of a chat. So the chat's next turn always
finds the mark at which the chat ended before.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass

from baton.v1 import inference_pb2

BLOCK_BYTES = 256
"""The distance between two marks inside a text: 64 token ids of 4 bytes, or about as many tokens of text."""
BLOCK_SHARE = 32
"""The distance between two marks is at least 1/BLOCK_SHARE of the bytes before them, so a long request has only some
hundreds of marks.
"""
LAST_MESSAGES = 8
"""The number of last messages of a chat whose ends are always marked, however short they are. A turn adds fewer
messages, unless it calls many tools.
"""
MAX_BYTES = 1 << 20
"""Only this many bytes at the start of a request get marks, so that hashing a request takes some milliseconds at most.
"""
MAX_BEGINNINGS = 65_536
"""The most beginnings that are remembered: those of about a thousand chats of 10,000 tokens."""
MIN_SHARED = 0.5
"""A beginning that several requests share, such as a system prompt, decides the server only if it is at least this part
of the request. Otherwise all requests with the same short system prompt would go to one server, and the caches of the
others would stay empty.
"""

_DIGEST_BYTES = 8
_ID_BYTES = array("I").itemsize


@dataclass(frozen=True, slots=True)
class Beginnings:
    """The beginnings of one request (its marked prefixes), shortest first: the digest and the bytes of each.

    `num_bytes` is the size of the whole request. The last beginning is the whole request if it has that size.
    """

    digests: tuple[bytes, ...] = ()
    sizes: tuple[int, ...] = ()
    num_bytes: int = 0


NO_BEGINNINGS = Beginnings()


def beginnings_of(request: inference_pb2.GenerateRequest) -> Beginnings:
    """Returns the beginnings (marked prefixes) of a request's prompt. Requests with different cache salts share none,
    and a request with `cache_prompt` False has none.
    """
    if request.HasField("cache_prompt") and not request.cache_prompt:
        return NO_BEGINNINGS
    kind = request.WhichOneof("prompt") or ""
    marker = _Marker(f"{kind}\0{request.HasField('cache_salt')}\0{request.cache_salt}")
    match kind:
        case "chat":
            for tool in request.chat.tools:
                marker.add("\0".join((tool.name, tool.description, tool.parameters, "")).encode())
            if request.chat.chat_template_kwargs:
                marker.add(f"{request.chat.chat_template_kwargs}\0".encode())
            first_of_last = len(request.chat.messages) - LAST_MESSAGES
            for index, message in enumerate(request.chat.messages):
                parts = [message.role, message.content, message.name, message.tool_call_id, message.reasoning]
                for call in message.tool_calls:
                    parts += (call.id, call.name, call.arguments)
                marker.add("\0".join((*parts, "")).encode())
                marker.mark(is_one_of_last=index >= first_of_last)
                if marker.is_full:
                    break
        case "token_ids":
            marker.add(array("I", request.token_ids.ids[: MAX_BYTES // _ID_BYTES]).tobytes())
        case "text":
            marker.add(request.text.encode())
    return marker.beginnings()


class ServersByBeginning:
    """Maps each beginning (a marked prefix of requests) to the server that last accepted a request with it, and to the
    servers that are being asked such a request now.

    Holds at most `max_beginnings` of accepted requests, and forgets the least recent first.
    """

    def __init__(self, max_beginnings: int = MAX_BEGINNINGS) -> None:
        self._max_beginnings = max_beginnings
        # The server, and whether a whole request ended there: what begins so continues that request.
        self._known: OrderedDict[bytes, tuple[str, bool]] = OrderedDict()
        # For each beginning, how many calls ask each server for it; the last asked server is last.
        self._opening: dict[bytes, dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, beginnings: Beginnings, servers: Container[str]) -> str | None:
        """Returns the one of `servers` that knows the longest of the beginnings, or None.

        None also means that the longest is only a small part of the request, and no earlier request ended with it. A
        large beginning may also be found at a server that is being asked for it now; that server comes before the one
        that accepted it last.
        """
        for digest, num_bytes in zip(reversed(beginnings.digests), reversed(beginnings.sizes), strict=True):
            is_large = num_bytes >= MIN_SHARED * beginnings.num_bytes
            if is_large:
                for server in reversed(list(self._opening.get(digest, ()))):
                    if server in servers:
                        return server
            server, is_end = self._known.get(digest, ("", False))
            if server in servers:
                return server if is_end or is_large else None
        return None

    def note_opening(self, beginnings: Beginnings, server: str) -> None:
        """Notes that `server` is being asked for a request with these beginnings."""
        for digest in beginnings.digests:
            counts = self._opening.setdefault(digest, {})
            counts[server] = counts.pop(server, 0) + 1

    def forget_opening(self, beginnings: Beginnings, server: str) -> None:
        """Undoes one `note_opening`, if there is one: the request was accepted, or its call has ended."""
        for digest in beginnings.digests:
            counts = self._opening.get(digest, {})
            if counts.get(server, 0) > 1:
                counts[server] -= 1
                continue
            counts.pop(server, None)
            if not counts:
                self._opening.pop(digest, None)

    def note(self, beginnings: Beginnings, server: str) -> None:
        """Notes that `server` has accepted a request with these beginnings."""
        middle, end = (server, False), (server, True)
        has_end = beginnings.sizes[-1:] == (beginnings.num_bytes,)
        for place, digest in enumerate(reversed(beginnings.digests)):  # a request's end is forgotten before its start
            _, was_end = self._known.get(digest, middle)
            self._known[digest] = end if was_end or (has_end and place == 0) else middle
            self._known.move_to_end(digest)
        while len(self._known) > self._max_beginnings:
            self._known.popitem(last=False)


class _Marker:
    """Marks positions of a request while its bytes are added, and keeps the digest of all bytes up to each mark."""

    def __init__(self, namespace: str) -> None:
        self._hash = hashlib.blake2b(f"{namespace}\0".encode(), digest_size=_DIGEST_BYTES)
        self._digests: list[bytes] = []
        self._sizes: list[int] = []
        self._num_bytes = 0
        self._last = 0

    @property
    def is_full(self) -> bool:
        return self._num_bytes >= MAX_BYTES

    def add(self, data: bytes) -> None:
        """Adds bytes, with marks at the ends of blocks."""
        view = memoryview(data)[: MAX_BYTES - self._num_bytes]
        while len(view) >= (room := self._last + max(BLOCK_BYTES, self._last // BLOCK_SHARE) - self._num_bytes):
            self._hash.update(view[:room])
            self._num_bytes += room
            self._mark()
            view = view[room:]
        self._hash.update(view)
        self._num_bytes += len(view)

    def mark(self, *, is_one_of_last: bool) -> None:
        """Marks the end of a message if it is far enough from the last mark, or if the message is one of the last."""
        if self._num_bytes - self._last > self._last // BLOCK_SHARE:
            self._mark()
        elif is_one_of_last and self._sizes[-1:] != [self._num_bytes]:
            self._keep()  # without a change of later marks, which must depend on the bytes before them only

    def beginnings(self) -> Beginnings:
        return Beginnings(tuple(self._digests), tuple(self._sizes), self._num_bytes)

    def _mark(self) -> None:
        self._keep()
        self._last = self._num_bytes

    def _keep(self) -> None:
        self._digests.append(self._hash.copy().digest())
        self._sizes.append(self._num_bytes)
