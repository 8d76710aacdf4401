"""Services that expose known counts, and collectors that poll them when the test tells them to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry

from baton.errors import Unavailable
from baton.server_info import InferenceLoad, PrefillReplica
from common.grammar.grammar import GrammarKind
from common.rpc.name_lookup import LookUp
from common.telemetry.exposition import MetricsServer
from common.telemetry.metrics import EngineMetrics, RequestMetrics, SpeculationMetrics
from common.telemetry.stats import EngineLoad, PoolCounts
from decode_service.messages import FinishReason
from gateway.status.collector import Sampler
from gateway.status.watched import Address
from prefill_service.edge.observer import HandoffMetrics

IDLE = EngineLoad(
    rows=PoolCounts(total=8, free=4, reserved=1, transferring=1, running=1, quarantined=1),
    slots=PoolCounts(total=64, free=60, running=4),
    num_queued=5,
    num_running=1,
    num_steps=7,
    unsent_bytes=11,
)

POOL = PoolCounts(total=8, free=8)
REPLICAS = (
    PrefillReplica("p:1", True, 3, "", num_known_tokens=40),
    PrefillReplica("p:2", False, 0, "connection refused"),
)
LOAD = InferenceLoad("d1", POOL, POOL, 0, 2, 7, REPLICAS, 0, 0)


class Exposed:
    """The real metrics of a service, served at an endpoint of its own."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.load = IDLE
        self.engine = EngineMetrics(registry)
        self.is_ready = True
        self.grpc_port = 0
        self.engine.watch(lambda: self.load, is_ready=lambda: self.is_ready, grpc_port=lambda: self.grpc_port)
        self._register(registry)
        self._server = MetricsServer("127.0.0.1:0", registry)

    def _register(self, registry: CollectorRegistry) -> None:
        raise NotImplementedError

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.port}"

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.__exit__(kind, error, trace)


class ExposedDecode(Exposed):
    def _register(self, registry: CollectorRegistry) -> None:
        self.requests = RequestMetrics(registry, finish_reasons=FinishReason, grammar_kinds=GrammarKind)
        self.speculation = SpeculationMetrics(registry)


class ExposedPrefill(Exposed):
    def _register(self, registry: CollectorRegistry) -> None:
        self.handoff = HandoffMetrics(registry)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Decode:
    """A fake decode service that answers GetLoad."""

    def __init__(self, load: InferenceLoad | None = None) -> None:
        self.answer = load
        self.is_closed = False

    async def load(self) -> InferenceLoad:
        if self.answer is None:
            raise Unavailable("connection refused")
        return self.answer

    async def close(self) -> None:
        self.is_closed = True


class Names:
    """A fake name service. `addresses` are the current ones of each name."""

    def __init__(self, **addresses: Sequence[str]) -> None:
        self.addresses = dict(addresses)

    def __call__(self, host: str, port: int) -> Sequence[str]:
        if host not in self.addresses:
            raise OSError("no such name")
        return self.addresses[host]


def numeric(host: str, port: int) -> Sequence[str]:
    return (f"{host}:{port}",)


def sampler(
    clock: Clock,
    metrics: Sequence[str] = (),
    decode: Sequence[str] = (),
    *,
    look_up: LookUp = numeric,
    open_client: Callable[[Address], Decode] = lambda address: Decode(),
    timeout_s: float = 60.0,
) -> Sampler:
    return Sampler(
        metrics_targets=metrics,
        decode_targets=decode,
        open_client=open_client,
        look_up=look_up,
        interval_s=2.0,
        window_s=60.0,
        timeout_s=timeout_s,
        clock=clock,
    )
