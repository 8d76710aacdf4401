"""When the decode service may be sent requests."""

from __future__ import annotations

from common.engine_thread import EnginePort
from decode_service.edge.live_requests import LiveRequests
from decode_service.edge.replicas import ReplicaBoard
from decode_service.messages import Command


def is_ready(*, engine: EnginePort[Command], replicas: ReplicaBoard, live_requests: LiveRequests) -> bool:
    """A replica is ready only when its fingerprint agreed, so a request admitted now can be computed."""
    return engine.is_alive and replicas.is_any_ready and not live_requests.is_draining
