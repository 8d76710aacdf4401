"""Host names to which a test gives addresses, in place of the system's resolver."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import pytest


class Names:
    """Answers look-ups of the names in `hosts`, and fails those of other names. Numeric hosts are their own address."""

    def __init__(self, **hosts: Sequence[str]) -> None:
        self.hosts: dict[str, Sequence[str]] = dict(hosts)
        self._system = socket.getaddrinfo

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host: str, port: int, *args: Any, **options: Any) -> list[Any]:
        if host.replace(".", "").isdigit():
            return self._system(host, port, *args, **options)
        if host not in self.hosts:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [each for number in self.hosts[host] for each in self._system(number, port, *args, **options)]
