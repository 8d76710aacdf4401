"""A DNS server on loopback that answers with addresses a test gives it."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Self

import dns.message
import dns.rdatatype
import dns.rrset


class NameServer:
    """Answers every question for an IPv4 address with `addresses`, whatever the name. Any other question gets an empty
    answer.
    """

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._answer, name="name-server", daemon=True)

    def target(self, name: str, port: int) -> str:
        """The gRPC target that resolves `name` at this server."""
        return f"dns://127.0.0.1:{self._socket.getsockname()[1]}/{name}:{port}"

    def _answer(self) -> None:
        while True:
            question, peer = self._socket.recvfrom(4096)
            if not question:
                return
            response = dns.message.make_response(dns.message.from_wire(question))
            asked = response.question[0]
            if asked.rdtype == dns.rdatatype.A:
                response.answer.append(dns.rrset.from_text(asked.name, 0, "IN", "A", *self.addresses))
            self._socket.sendto(response.to_wire(), peer)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._socket.getsockname())
        self._thread.join(10.0)
        self._socket.close()
