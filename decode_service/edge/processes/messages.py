"""The messages between the engine's process and the processes of its edges. They are pickled."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import Metric

from common.errors import BatonError
from common.role import Role
from common.sampling.params import ResolvedSampling
from common.service.roles import RoleState
from common.telemetry.stats import EngineLoad
from common.telemetry.timeline import RecordedTrack
from decode_service.edge.assembly import EdgePlan
from decode_service.edge.replicas import ReplicaState
from decode_service.messages import Command, RequestEvent

# ---- to an edge -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message. `number` is the edge's, from 1."""

    plan: EdgePlan
    number: int


@dataclass(frozen=True, slots=True)
class Listen:
    address: str


@dataclass(frozen=True, slots=True)
class EdgeState:
    """The state that an edge shows to clients: readiness, role, and the engine's and the replicas' state."""

    is_ready: bool
    is_alive: bool
    role: RoleState
    load: EngineLoad
    replicas: tuple[ReplicaState, ...]


@dataclass(frozen=True, slots=True)
class Events:
    """Events of this edge's requests."""

    events: Sequence[RequestEvent]


@dataclass(frozen=True, slots=True)
class AnswerTo:
    """Answers the `Ask` with this number: with a value, or with an error that the asker raises."""

    number: int
    value: Any = None
    error: BatonError | None = None


@dataclass(frozen=True, slots=True)
class StopAdmitting:
    """Tells the edge to admit no requests. It answers NothingLive once none is live."""


@dataclass(frozen=True, slots=True)
class FailAll:
    error: BatonError


@dataclass(frozen=True, slots=True)
class Stop:
    """The edge stops its server, and then ends."""

    grace_s: float


# ---- from an edge ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listening:
    """Answers Listen with the port."""

    port: int


@dataclass(frozen=True, slots=True)
class CannotStart:
    """The edge ends, because of this error."""

    error: BatonError


@dataclass(frozen=True, slots=True)
class EdgeSaid:
    """Says from time to time that the edge is alive, and has its metrics."""

    metrics: tuple[Metric, ...]


@dataclass(frozen=True, slots=True)
class NothingLive:
    """No request is live, and none will be admitted."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks a question, which AnswerTo answers under the same number."""

    number: int
    question: Question


@dataclass(frozen=True, slots=True)
class NoLonger:
    """Nobody waits for the answer with this number any more."""

    number: int


@dataclass(frozen=True, slots=True)
class MakeMatcher:
    """Asks for the matcher of a request that will be submitted. The answer is a HeldMatcher."""

    sampling: ResolvedSampling
    output_ids: tuple[int, ...]
    client: str
    tenant: str


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """Orders a change to `role`. The answer is the role's state."""

    role: Role


@dataclass(frozen=True, slots=True)
class Record:
    """Begins to record the timeline of the engine's process. The answer is None."""

    max_events: int


@dataclass(frozen=True, slots=True)
class EndRecording:
    """Ends what `Record` has begun. The answer has the tracks, packed."""


Question = MakeMatcher | ChangeRole | Record | EndRecording


@dataclass(frozen=True, slots=True)
class HeldMatcher:
    """Stands for a matcher that is in the engine's process."""

    number: int


ToEdge = Begin | Listen | EdgeState | Events | AnswerTo | StopAdmitting | FailAll | Stop
FromEdge = Command | Listening | CannotStart | EdgeSaid | NothingLive | Ask | NoLonger


_EVENTS_TOGETHER = 2048


def packed(tracks: Sequence[RecordedTrack]) -> list[bytes]:
    """Pickles tracks in parts, so that a thread that does it lets others run in between."""
    return [
        pickle.dumps(RecordedTrack(track.name, track.events[begin : begin + _EVENTS_TOGETHER], track.num_dropped))
        for track in tracks
        for begin in range(0, max(len(track.events), 1), _EVENTS_TOGETHER)
    ]


def unpacked(parts: Sequence[bytes]) -> list[RecordedTrack]:
    tracks: dict[str, RecordedTrack] = {}
    for part in parts:
        track: RecordedTrack = pickle.loads(part)
        tracks.setdefault(track.name, track._replace(events=[])).events.extend(track.events)
    return list(tracks.values())
