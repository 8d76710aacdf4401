"""A snapshot as the document that readers get."""

from __future__ import annotations

import dataclasses
import json

from gateway.status.snapshot import Snapshot


class Document:
    """`snapshot` as JSON: written once, however many read it; only its age is told to each."""

    def __init__(self, snapshot: Snapshot) -> None:
        fields = dataclasses.asdict(snapshot)
        del fields["age_s"]
        self._others = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()

    def at_age(self, age_s: float | None) -> bytes:
        return b'{"age_s":%s,%s' % (json.dumps(age_s).encode(), self._others[1:])
