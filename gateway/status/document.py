"""The JSON document of a snapshot that viewers receive."""

from __future__ import annotations

import dataclasses
import json

from gateway.status.snapshot import Gateway, Snapshot


class Document:
    """A snapshot as JSON. It is serialised once for all viewers; only its age is added for each."""

    def __init__(self, snapshot: Snapshot) -> None:
        fields = dataclasses.asdict(snapshot)
        del fields["age_s"]
        self._others = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()

    @staticmethod
    def beside(gateway: Gateway, document: bytes) -> bytes:
        """Returns `document`, a snapshot as JSON, with the gateway's own state added."""
        return b'{"gateway":%s,%s' % (json.dumps(dataclasses.asdict(gateway)).encode(), document[1:])

    def at_age(self, age_s: float | None) -> bytes:
        return b'{"age_s":%s,%s' % (json.dumps(age_s).encode(), self._others[1:])
