"""Tests of a service that runs as the child process of a Serve replica. The process is a stand-in."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from baton.errors import BatonError, ServiceDied, StartTimedOut
from baton.service_process import ProcessRole
from baton.v1 import inference_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton_ray.service import Announcement, Exchange, Service
from tests.client.scripted_inference import ScriptedInference, ScriptedServer

BOUND_S = 60.0
TOKEN = "a-token-of-the-test"


class StandIn:
    """A process that only writes a log. `port` is where it says that it listens; None: nowhere yet."""

    def __init__(self, *, role: str, name: str, address: str, arguments: Sequence[str], log_file: Path) -> None:
        self.name, self.arguments, self.log_file = name, tuple(arguments), log_file
        self.port: int | None = None
        self.ends_by_itself = True
        self.ended = threading.Event()
        self.signals: list[str] = []

    def start(self) -> None:
        if self.port is not None:
            self.log_file.write_text(json.dumps({"event": "serving", "port": self.port, "level": "info"}) + "\n")

    def check(self) -> None:
        if self.ended.is_set():
            raise ServiceDied(self.name, 1, "no memory", self.log_file)

    def log_tail(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    def terminate(self) -> None:
        self.signals.append("TERM")
        if self.ends_by_itself:
            self.ended.set()

    def kill(self) -> None:
        self.signals.append("KILL")
        self.ended.set()

    def wait(self, timeout_s: float) -> bool:
        return self.ended.wait(timeout_s)


class Rig:
    """Makes services whose process is a stand-in. What answers for decode services is `server`."""

    def __init__(self, log_dir: Path) -> None:
        self.server = ScriptedServer()
        self.processes: list[StandIn] = []
        self.announced: list[tuple[Announcement, str]] = []
        self.found: tuple[str, ...] | Exception = ()
        self.changed = threading.Condition()
        self._log_dir = log_dir

    def service(
        self, role: ProcessRole = "decode", *, port: int | None = None, ends_by_itself: bool = True, **options: Any
    ) -> Service:
        def new_process(**given: Any) -> StandIn:
            process = StandIn(**given)
            process.port = int(self.server.address.rpartition(":")[2]) if port is None else port or None
            process.ends_by_itself = ends_by_itself
            self.processes.append(process)
            return process

        exchange: Exchange = self._exchange
        return Service(
            role=role,
            name="r1",
            host="127.0.0.1",
            flags=["--max-rows=4"],
            log_dir=self._log_dir,
            exchange=exchange,
            new_process=new_process,  # type: ignore[arg-type]
            **{"start_timeout_s": BOUND_S, "stop_timeout_s": BOUND_S, "exchange_interval_s": 0.01, **options},
        )

    def exchanges_until(self, holds: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(holds, BOUND_S)

    def one_more_exchange(self) -> None:
        before = len(self.announced)
        self.exchanges_until(lambda: len(self.announced) > before + 1)

    def _exchange(self, announcement: Announcement, wanted: str) -> Sequence[str]:
        with self.changed:
            self.announced.append((announcement, wanted))
            self.changed.notify_all()
            if isinstance(self.found, Exception):
                raise self.found
            return self.found


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.server.stop()


def test_it_listens_on_a_free_port_and_follows_a_file_of_those_it_calls(rig: Rig, tmp_path: Path) -> None:
    service = rig.service()
    service.start()
    (process,) = rig.processes
    assert service.address == rig.server.address
    assert {"--max-rows=4", "--listen=127.0.0.1:0"} < set(process.arguments)
    rig.found = ("10.0.0.1:1", "10.0.0.2:1")
    rig.one_more_exchange()
    assert rig.announced[-1] == (Announcement("decode", "r1", service.address), "prefill")
    (flag,) = [each for each in process.arguments if each.startswith("--prefill=file:///")]
    file = Path(flag.removeprefix("--prefill=file://"))
    assert file.parent == tmp_path
    assert file.read_text() == "10.0.0.1:1\n10.0.0.2:1\n"

    rig.found = OSError("the directory is lost")
    rig.one_more_exchange()
    rig.found = ()
    rig.one_more_exchange()
    assert file.read_text() == "10.0.0.1:1\n10.0.0.2:1\n", "a directory that knows nobody takes nothing away"
    rig.found = ("10.0.0.3:1",)
    rig.one_more_exchange()
    assert file.read_text() == "10.0.0.3:1\n"
    service.stop()
    service.stop()
    assert process.signals == ["TERM"]
    assert list(tmp_path.iterdir()) == [process.log_file], "and nothing is left elsewhere if the replica is killed"


def test_a_service_that_has_ended_is_not_healthy(rig: Rig) -> None:
    service = rig.service()
    service.start()
    service.check()
    rig.processes[0].ended.set()
    with pytest.raises(ServiceDied, match="no memory"):
        service.check()
    service.stop()


def test_a_service_that_does_not_answer_is_not_healthy(rig: Rig) -> None:
    service = rig.service()
    service.start()
    rig.server.stop()
    with pytest.raises(BatonError):
        service.check()
    service.stop()


def test_a_service_that_does_not_come_up_in_time_is_stopped(rig: Rig) -> None:
    service = rig.service(port=0, start_timeout_s=0.01)
    with pytest.raises(StartTimedOut):
        service.start()
    assert rig.processes[0].signals == ["TERM"]


def test_a_service_that_does_not_end_in_its_time_is_killed(rig: Rig) -> None:
    service = rig.service(ends_by_itself=False, stop_timeout_s=0.01)
    service.start()
    service.stop()
    assert rig.processes[0].signals == ["TERM", "KILL"]


class NeedsToken(grpc.ServerInterceptor):
    """Refuses every call without the token, but health checks, as services do."""

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        is_open = details.method.startswith("/grpc.health.v1.Health/")
        if is_open or ("authorization", f"Bearer {TOKEN}") in details.invocation_metadata:
            return continuation(details)
        return grpc.unary_unary_rpc_method_handler(
            lambda _, context: context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        )


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_service_tells_its_load_to_who_has_the_first_token_of_its_file(
    rig: Rig, role: ProcessRole, tmp_path: Path
) -> None:
    """The load of prefill is its uncomputed tokens, and that of decode the share of its rows in use."""

    class Prefill(prefill_pb2_grpc.PrefillServicer):
        def GetLoad(self, request: Any, context: Any) -> prefill_pb2.GetPrefillLoadResponse:
            return prefill_pb2.GetPrefillLoadResponse(num_uncomputed_tokens=300)

    server = grpc.server(ThreadPoolExecutor(2), interceptors=[NeedsToken()])
    prefill_pb2_grpc.add_PrefillServicer_to_server(Prefill(), server)
    inference_pb2_grpc.add_InferenceServicer_to_server(ScriptedInference(), server)
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    (tokens := tmp_path / "tokens").write_text(f"{TOKEN}\nanother-token\n")
    service = rig.service(role, port=port, token_file=tokens)
    service.start()
    service.check()
    assert service.load() == {"prefill": 300, "decode": 0.75}[role]
    calls_others = any("file://" in each for each in rig.processes[0].arguments)
    assert calls_others == (role == "decode"), "prefill calls nobody"
    service.stop()
    server.stop(None).wait(BOUND_S)


def test_a_gateway_is_healthy_while_it_lives_whether_or_not_it_is_ready(rig: Rig) -> None:
    class Gateway(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health/live" else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Gateway) as server, ThreadPoolExecutor(1) as executor:
        executor.submit(server.serve_forever)
        service = rig.service("gateway", port=server.server_port)
        service.start()
        service.check()
        assert any(each.startswith("--decode=file:///") for each in rig.processes[0].arguments)
        service.stop()
        server.shutdown()
