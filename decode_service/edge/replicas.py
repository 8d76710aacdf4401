"""The states of the prefill replicas for GetLoad and the health check."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from common.wire.handoff import PrebuiltBatch, RowFailed
from decode_service.handoff.transport import TransportReport
from decode_service.messages import CallEnded, DegradedChanged, FrameArrived, Replica, ReplicasChanged, StartHandoff

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica's state. `num_rows` counts the rows sent by this service that the replica has not answered yet."""

    replica: Replica
    num_rows: int


class ReplicaStates(Protocol):
    def states(self) -> Sequence[ReplicaState]: ...


class ReplicaBoard(ReplicaStates):
    """Tracks the replicas' states and open rows from the messages between engine and transport. Any thread may use it.

    If the service `serves_alone`, it computes prompts itself while no replica is ready. The log says when that begins,
    and why, and when it ends.
    """

    def __init__(self, *, serves_alone: bool = False) -> None:
        self._serves_alone = serves_alone
        self._lock = threading.Lock()
        self._replicas: tuple[Replica, ...] = ()
        self._open_rows: dict[str, tuple[str, set[int]]] = {}  # by call: replica address, rows not answered

    @property
    def can_serve(self) -> bool:
        """Whether a request's prompt would be computed: by a ready replica, or by this service."""
        return self._serves_alone or any(replica.is_ready for replica in self._replicas)

    def states(self) -> tuple[ReplicaState, ...]:
        with self._lock:
            num_rows = dict.fromkeys((replica.address for replica in self._replicas), 0)
            for address, rows in self._open_rows.values():
                num_rows[address] = num_rows.get(address, 0) + len(rows)
            return tuple(ReplicaState(replica, num_rows[replica.address]) for replica in self._replicas)

    def on_start(self, command: StartHandoff) -> None:
        with self._lock:
            self._open_rows[command.call_id] = (command.replica, set(range(len(command.rows))))

    def on_report(self, report: TransportReport) -> None:
        with self._lock:
            match report:
                case ReplicasChanged(replicas):
                    self._replicas = replicas
                case CallEnded(call_id):
                    self._open_rows.pop(call_id, None)
                case FrameArrived(call_id, RowFailed(row=row)):
                    self._answered(call_id, {row})
                case FrameArrived(call_id, PrebuiltBatch(rows=rows)):
                    self._answered(call_id, set(rows.tolist()))
                case _:
                    pass

    def on_degraded(self, event: DegradedChanged) -> None:
        if event.is_degraded:
            _log.warning("degraded", reason=event.reason)
        else:
            _log.info("degraded_no_more")

    def _answered(self, call_id: str, rows: set[int]) -> None:
        if call_id in self._open_rows:
            self._open_rows[call_id][1].difference_update(rows)
