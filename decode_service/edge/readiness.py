"""When the decode service may be sent requests."""

from __future__ import annotations

from decode_service.edge.live_requests import LiveRequests
from decode_service.edge.replicas import ReplicaBoard


def is_ready(*, is_engine_well: bool, replicas: ReplicaBoard, live_requests: LiveRequests) -> bool:
    """A replica is ready only when its fingerprint agreed, so a request admitted now can be computed."""
    return is_engine_well and replicas.is_any_ready and not live_requests.is_draining
