"""Remembers which server last had the beginning of a request, so that requests that begin alike can go to one server.

A server that has a beginning has its KV cached. The client sees no tokens, so it compares bytes: of a chat's messages,
of a text, or of token ids. Some positions of a request are marked, and the bytes up to each mark are a *beginning*,
known by a digest:

chat  | system . question | answer . question |     marks: ends of messages (|), and blocks in long ones
text  |  block  |  block  |  block  |  rest         marks: ends of blocks

A mark depends only on the bytes before it. So two requests have the same beginnings as far as they are equal. Only the
ends of a chat's last messages are always marked: where a chat ended, its next turn finds the mark again.
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
"""Two marks are at least this part of the bytes before them apart. So a long request has some hundreds of marks."""
LAST_MESSAGES = 8
"""The ends of so many last messages of a chat are marked, however short they are: a turn adds fewer, unless it calls
many tools.
"""
MAX_BYTES = 1 << 20
"""Only the first so many bytes of a request get marks, so that hashing one takes some milliseconds at most."""
MAX_BEGINNINGS = 65_536
"""The most beginnings that are remembered: those of about a thousand chats of 10,000 tokens."""
MIN_SHARED = 0.5
"""A beginning that several requests share, such as a system prompt, decides only if it is at least this part of the
request. Otherwise all requests with the same short system prompt would go to one server, and leave the other ones'
caches empty.
"""

_DIGEST_BYTES = 8
_ID_BYTES = array("I").itemsize


@dataclass(frozen=True, slots=True)
class Beginnings:
    """A request's beginnings, the shortest first: their digests, and how many bytes each has of `num_bytes`. The last
    one is the whole request if it has as many.
    """

    digests: tuple[bytes, ...] = ()
    sizes: tuple[int, ...] = ()
    num_bytes: int = 0


NO_BEGINNINGS = Beginnings()


def beginnings_of(request: inference_pb2.GenerateRequest) -> Beginnings:
    """Returns the beginnings of a request's prompt in the namespace of its salt. A request with `cache_prompt` False
    has none.
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
    """The server that last accepted each beginning, and those that are being asked for it now. Of the accepted ones it
    forgets the least recent.
    """

    def __init__(self, max_beginnings: int = MAX_BEGINNINGS) -> None:
        self._max_beginnings = max_beginnings
        # The server, and whether a whole request ended there: what begins so continues that request.
        self._known: OrderedDict[bytes, tuple[str, bool]] = OrderedDict()
        # How many calls ask each server for it, the last asked server last.
        self._opening: dict[bytes, dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def find(self, beginnings: Beginnings, servers: Container[str]) -> str | None:
        """Returns the one of `servers` that has the longest known beginning, or None if there is none.

        A beginning decides if an earlier request ended there, or if it is a large part of this request. A server that
        is being asked for it now counts before the one that accepted it last.
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
        """Ends one `note_opening`, if there is one: the request was accepted, or its call has ended."""
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
    """Marks positions of a request while its bytes are added, and keeps the digest of the bytes up to each."""

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
        """Marks the end of a message, if it is far enough from the last mark or one of the chat's last messages."""
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
