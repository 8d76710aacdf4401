"""The faults to inject into a service: what goes wrong, where and how often. A plan is a JSON file.

{"seed": 7, "faults": [{"point": "handoff.frame", "action": "drop", "rate": 0.01}]}

| point | visited by | actions |
|---|---|---|
| `handoff.frame` | each frame that the prefill service sends | FRAME_ACTIONS, kill |
| `handoff.command` | each command that the prefill service receives | FRAME_ACTIONS except reorder, kill |
| `handoff.received` | each frame that the decode service reads | truncate, corrupt, kill |
| `pool.reserve` | each request for a row | fail (no row is free), kill |
| `memory.host` | each allocation of host memory | fail (out of memory), kill |
| `shared_memory.lent` | each segment that prefill lends | stall, reuse (its slots), unlink (the socket), kill |
| `shared_memory.read` | each such segment after it is copied and before it is checked | stall, kill |
| `stream.<name>` | each piece (unit of work) on that stream of STREAM_PIECES, before it runs | stall, raise, kill |
| `stream.<name>.<piece>` | each piece of that name, before it runs | stall, raise, kill |
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Action(StrEnum):
    DELAY = "delay"
    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"
    FAIL = "fail"
    STALL = "stall"
    RAISE = "raise"
    REUSE = "reuse"
    UNLINK = "unlink"
    KILL = "kill"


FRAME_ACTIONS = frozenset(
    {Action.DELAY, Action.DROP, Action.DUPLICATE, Action.REORDER, Action.TRUNCATE, Action.CORRUPT}
)
_ACTIONS: dict[str, frozenset[Action]] = {
    "handoff.frame": FRAME_ACTIONS,
    "handoff.command": FRAME_ACTIONS - {Action.REORDER},
    "handoff.received": frozenset({Action.TRUNCATE, Action.CORRUPT}),
    "pool.reserve": frozenset({Action.FAIL}),
    "memory.host": frozenset({Action.FAIL}),
    "shared_memory.lent": frozenset({Action.STALL, Action.REUSE, Action.UNLINK}),
    "shared_memory.read": frozenset({Action.STALL}),
}
_STREAM_ACTIONS = frozenset({Action.STALL, Action.RAISE})
STREAM_PIECES: dict[str, frozenset[str]] = {
    "forward": frozenset(
        {
            "reset",
            "resolve",
            "forward",
            "draft",
            "verify",
            "publish_lengths",
            "read",
            "stash_payload",
            "copy_results",
        }
    ),
    "landing": frozenset({"land"}),
    "sending": frozenset({"copy_out"}),
}
"""The services' streams, and the names of the pieces that run on each. The schedule stream is missing because it has
no pieces: it only records and waits.
"""
_ACTIONS |= {f"stream.{name}": _STREAM_ACTIONS for name in STREAM_PIECES}
_ACTIONS |= {f"stream.{name}.{piece}": _STREAM_ACTIONS for name, pieces in STREAM_PIECES.items() for piece in pieces}
_TIMED = frozenset({Action.DELAY, Action.STALL})


class Fault(BaseModel):
    """A fault: `action` happens at visits of `point`. Either it hits visit number `at` (from 1), or each visit with
    probability `rate`, at most `at_most` times.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    point: str
    action: Action
    rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    at: Annotated[int, Field(ge=1)] | None = None
    at_most: Annotated[int, Field(ge=1)] | None = None
    seconds: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        allowed = _ACTIONS.get(self.point)
        if allowed is None:
            raise ValueError(f"point: there is no {self.point!r}")
        if self.action not in allowed | {Action.KILL}:
            raise ValueError(f"action: {self.action} cannot happen at {self.point}")
        if (self.at is None) == (self.rate == 0.0):
            raise ValueError("give either at or rate")
        if (self.action in _TIMED) != (self.seconds > 0):
            raise ValueError(f"seconds: {self.action} takes {'some' if self.action in _TIMED else 'none'}")
        return self


class FaultPlan(BaseModel):
    """The faults to inject. If several faults of a point hit a visit, the first happens. With the same `seed`, two
    runs hit the same visits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    @classmethod
    def read(cls, path: Path) -> FaultPlan:
        """Reads a plan from a JSON file. Raises OSError or pydantic's ValidationError."""
        return cls.model_validate_json(path.read_text())

    def write(self, path: Path) -> Path:
        path.write_text(self.model_dump_json())
        return path
