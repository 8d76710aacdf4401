"""A12: what the services say about themselves is enough to call them, and true."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client import CollectorRegistry

from baton import errors
from baton.client import AsyncClient, Client
from baton.events import Delta
from baton.server_info import HealthStatus
from common.config.settings import DecodeSettings
from common.errors import EngineLost
from common.kv.pool_size import PoolSize
from common.load import EngineLoad
from common.service.runtime import open_runtime
from common.service.service_main import Process
from common.telemetry.engine_metrics import EngineMetrics
from decode_service import main as decode_main
from decode_service.messages import Command, Event
from decode_service.schedule.scheduler import DecodeEngine
from tests.support.running_pair import BOUND_S, RunningPair

SIZE = PoolSize(max_rows=4, max_kv_tokens=8192, max_context_tokens=4096, decided_by="the test")
SERVICES = {"decode": "baton.v1.Inference", "prefill": "baton.v1.Prefill"}


@pytest.fixture
def pair(plain_pair: RunningPair) -> RunningPair:
    return plain_pair


def address_of(pair: RunningPair, role: str) -> str:
    addresses = {"decode": pair.processes.decode_addresses, "prefill": pair.processes.prefill_addresses}
    return addresses[role][0]


@pytest.mark.parametrize("role", SERVICES)
def test_reflection_lists_the_services_and_health_knows_them(pair: RunningPair, role: str) -> None:
    with grpc.insecure_channel(address_of(pair, role)) as channel:
        services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    common = {"baton.v1.Timeline", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    assert services == {SERVICES[role], *common}
    with Client(address_of(pair, role)) as client:
        assert client.health("") is HealthStatus.SERVING
        assert client.health(SERVICES[role]) is HealthStatus.SERVING
        assert client.health("baton.v1.Nonesuch") is HealthStatus.UNKNOWN_SERVICE


def test_a_request_can_be_made_from_reflected_descriptors_alone(pair: RunningPair) -> None:
    with grpc.insecure_channel(address_of(pair, "decode")) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        service = pool.FindServiceByName("baton.v1.Inference")
        assert {method.name for method in service.methods} == {"Generate", "GetLoad", "GetModelInfo"}
        method = service.FindMethodByName("Generate")
        request_class, event_class = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        generate = channel.unary_stream(
            f"/{service.full_name}/{method.name}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=event_class.FromString,
        )
        request = request_class(text="the", sampling={"max_tokens": 5, "ignore_eos": True, "seed": 1})
        kinds = [event.WhichOneof("event") for event in generate(request, timeout=BOUND_S)]
    assert (kinds[0], kinds[-1]) == ("started", "finished")
    assert set(kinds[1:-1]) == {"delta"}


class MortalEngine:
    """A decode engine whose next step raises once `is_cursed`."""

    def __init__(self, engine: DecodeEngine) -> None:
        self._engine = engine
        self.is_cursed = threading.Event()

    def step(self, commands: Sequence[Command]) -> Sequence[Event]:
        if self.is_cursed.is_set():
            raise RuntimeError("cursed")
        return self._engine.step(commands)

    def idle_timeout_s(self) -> float:
        return self._engine.idle_timeout_s()

    def be_woken_by(self, wake: Callable[[], None]) -> None:
        self._engine.be_woken_by(wake)

    def load(self) -> EngineLoad:
        return self._engine.load()

    @property
    def recorded(self) -> None:
        return None

    def close(self) -> None:
        self._engine.close()


@asynccontextmanager
async def decode_here(
    settings: DecodeSettings, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[AsyncClient, MortalEngine, asyncio.Task[None]]]:
    """A decode service in this process, until it ends by itself, or SIGTERM ends it in order."""
    process = Process(instance_id="here", runtime=open_runtime(settings), registry=CollectorRegistry())
    engine = MortalEngine(decode_main._engine(settings, process, SIZE, EngineMetrics(CollectorRegistry()).on_step))
    monkeypatch.setattr(decode_main, "_engine", lambda *_: engine)
    serving = asyncio.create_task(decode_main.serve(settings, process))
    try:
        async with AsyncClient(settings.listen) as client:
            await wait_for_health(client, HealthStatus.SERVING)
            yield client, engine, serving
    finally:
        if not serving.done():  # else nobody takes the signal
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(BOUND_S):
                await serving
        engine.close()
        await asyncio.to_thread(process.runtime.close)


async def wait_for_health(client: AsyncClient, status: HealthStatus) -> None:
    async with asyncio.timeout(BOUND_S):
        while await health(client) is not status:  # noqa: ASYNC110 - it can only be looked at
            await asyncio.sleep(0.01)


async def health(client: AsyncClient) -> HealthStatus | None:
    try:
        return await client.health("baton.v1.Inference")
    except errors.Unavailable:
        return None


def free_address() -> str:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{held.getsockname()[1]}"


async def test_an_engine_that_died_ends_its_streams_and_the_service(
    pair: RunningPair, tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = DecodeSettings(
        model=str(tiny_model_dir("llama")),
        dtype="float32",
        listen=free_address(),
        prefill=pair.processes.prefill_addresses,
        num_threads=1,
        max_kv_tokens=8192,
        debug_checks=True,
    )
    async with decode_here(settings, monkeypatch) as (client, engine, serving):
        stream = client.generate(token_ids=[10, 11, 12], max_tokens=3000, ignore_eos=True, temperature=0.0)
        async for event in stream:
            if isinstance(event, Delta):
                break

        engine.is_cursed.set()

        with pytest.raises(errors.Unavailable, match="cursed") as ended:
            async for _ in stream:
                pass
        assert ended.value.reason == "ENGINE_LOST"
        with pytest.raises(errors.Unavailable):
            await client.complete(token_ids=[10], max_tokens=1)
        with pytest.raises(EngineLost, match="the engine died"):
            async with asyncio.timeout(BOUND_S):
                await serving
