"""The JSON document of a snapshot that viewers receive."""

from __future__ import annotations

import dataclasses
import json

from gateway.status.snapshot import Snapshot


class Document:
    """A snapshot as JSON. It is serialised once for all viewers; only its age is added for each."""

    def __init__(self, snapshot: Snapshot) -> None:
        fields = dataclasses.asdict(snapshot)
        del fields["age_s"]
        self._others = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()

    def at_age(self, age_s: float | None) -> bytes:
        return b'{"age_s":%s,%s' % (json.dumps(age_s).encode(), self._others[1:])
