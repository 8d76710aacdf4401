"""A gateway in this process, on an event loop of its own, in front of the service at `decode`."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from opentelemetry.trace import Tracer

from common.config.settings import GatewaySettings
from common.telemetry.tracing import NO_TRACER
from gateway.limits import HttpLimits
from gateway.main import GatewayServer
from tests.support.loop_thread import LoopThread

BOUND_S = 60.0
COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "demo", "prompt": "hi"}


def post(body: Any, *head: str) -> bytes:
    """Returns the bytes of a completion request with this JSON body. `head` are further header lines."""
    sent = json.dumps(body).encode()
    lines = [f"POST {COMPLETIONS} HTTP/1.1", "host: localhost", "content-type: application/json", *head]
    return "\r\n".join([*lines, f"content-length: {len(sent)}", "", ""]).encode() + sent


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The JSON of each event of a stream. "[DONE]" stays a string."""
        *events, rest = self.body.decode().split("\n\n")
        assert rest == ""
        data = [event.rpartition("data: ")[2] for event in events]
        return [each if each == "[DONE]" else json.loads(each) for each in data]

    @property
    def chunks(self) -> list[Any]:
        """The JSON of each chunk of a stream that ends as OpenAI's do."""
        *chunks, done = self.events
        assert done == "[DONE]"
        return chunks

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        return error


@dataclass(frozen=True, slots=True)
class GatewayHere:
    server: GatewayServer
    loop: LoopThread
    port: int
    clients: list[openai.OpenAI] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, **options: Any) -> openai.OpenAI:
        """Returns an `openai` client that does not retry."""
        options = {"api_key": "none", "max_retries": 0, "timeout": BOUND_S, **options}
        self.clients.append(openai.OpenAI(base_url=f"{self.url}/v1", **options))
        return self.clients[-1]

    def openai_async(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=BOUND_S, **options)

    def connect(self, source: tuple[str, int] | None = None) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=BOUND_S, source_address=source)

    def ask(
        self, method: str, path: str, body: Any = None, *, source: tuple[str, int] | None = None, **headers: str
    ) -> Answer:
        """Sends one plain HTTP request. A `body` other than bytes is sent as JSON. A keyword x_y becomes the header
        x-y.
        """
        sent = {"content-type": "application/json"} if body is not None else {}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = self.connect(source)
        try:
            connection.request(method, path, body if isinstance(body, bytes | None) else json.dumps(body), sent)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def begin_body(
        self, sent: bytes = b"{", *, num_bytes: int = 1000, after: str | None = None
    ) -> http.client.HTTPConnection:
        """Sends a completion request's head and these bytes of the body, which is to have `num_bytes`. The connection
        first asks for the path `after`, if given.
        """
        connection = self.connect()
        if after is not None:
            connection.request("GET", after)
            connection.getresponse().read()
        connection.putrequest("POST", COMPLETIONS)
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(num_bytes))
        connection.endheaders(sent)
        return connection

    def send_raw(self, sent: bytes) -> Answer:
        """Sends bytes that need not be HTTP, and returns the first answer once the gateway has closed the
        connection.
        """
        with socket.create_connection(("127.0.0.1", self.port), BOUND_S) as connection:
            connection.sendall(sent)
            response = http.client.HTTPResponse(connection)
            response.begin()
            answer = Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
            assert connection.recv(1) == b""
            return answer

    def metric(self, name: str, **labels: str) -> float:
        """Returns the current value of a metric; 0 if it does not exist yet."""
        text = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        sample = f"{name}{{{text}}} " if text else f"{name} "
        for line in self.ask("GET", "/metrics").body.decode().splitlines():
            if line.startswith(sample):
                return float(line.removeprefix(sample))
        return 0.0


def key_file(directory: Path, *keys: str) -> Path:
    """Writes the API keys that a gateway accepts, and returns the file."""
    (directory / "keys").write_text("\n".join(keys))
    return directory / "keys"


@contextmanager
def gateway_here(
    loop: LoopThread,
    *decode: str,
    limits: Mapping[str, Any] | None = None,
    tracer: Tracer = NO_TRACER,
    **settings: Any,
) -> Iterator[GatewayHere]:
    """Runs a gateway, which gives decode services much time. `limits` overrides some of the limits that follow from
    `settings`.
    """
    made = GatewaySettings(listen="127.0.0.1:0", decode=decode, **{"admission_timeout_s": BOUND_S, **settings})

    async def start() -> tuple[GatewayServer, int]:
        bounds = HttpLimits.of(made)
        server = GatewayServer(
            made,
            tracer=tracer,
            limits=HttpLimits(**{**{n: getattr(bounds, n) for n in HttpLimits.__slots__}, **(limits or {})}),
        )
        return server, await server.start()

    server, port = loop.run(start())
    gateway = GatewayHere(server, loop, port)
    try:
        yield gateway
    finally:
        for client in gateway.clients:
            client.close()
        loop.run(server.stop())
