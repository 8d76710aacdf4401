"""TLS on both sides, the decode service's token, and settings that the gateway cannot follow."""

from __future__ import annotations

import base64
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

import gateway.main
from common.config.settings import GatewaySettings
from common.errors import ConfigError, StartupError
from gateway.main import GatewayServer
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, finished, started
from tests.gateway.gateway_here import GatewayHere, gateway_here, key_file
from tests.security.certificates import Authority
from tests.support.loop_thread import LoopThread
from tests.support.running_pair import wait_until


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


def test_https_outside_and_mutual_tls_with_a_token_inside(
    loop: LoopThread, authority: Authority, tmp_path: Path
) -> None:
    files, inner = authority.issue("gateway"), authority.issue("decode")
    (tmp_path / "token").write_text("inner-token\nold-token\n")
    credentials = grpc.ssl_server_credentials(
        [(inner.key.read_bytes(), inner.certificate.read_bytes())],
        root_certificates=authority.ca.read_bytes(),
        require_client_auth=True,
    )
    decode = ScriptedServer(credentials)
    decode.inference.script = [started(), delta([1], "a"), finished()]
    try:
        with gateway_here(
            loop,
            decode.address,
            tls_cert=files.certificate,
            tls_key=files.key,
            decode_tls=True,
            decode_tls_ca=authority.ca,
            decode_token_file=tmp_path / "token",
        ) as here:
            trusting = ssl.create_default_context(cafile=str(authority.ca))
            with openai.OpenAI(
                base_url=f"https://127.0.0.1:{here.port}/v1",
                api_key="none",
                max_retries=0,
                http_client=openai.DefaultHttpxClient(verify=trusting),
            ) as client:
                assert client.completions.create(model="demo", prompt="hi").choices[0].text == "a"
            with pytest.raises(OSError):
                here.ask("GET", "/health/live")
    finally:
        decode.stop()
    assert decode.inference.metadata.get(timeout=BOUND_S)["authorization"] == "Bearer inner-token"


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "half a hello"])
def test_a_tls_handshake_that_does_not_come_costs_the_connection(
    loop: LoopThread, authority: Authority, sent: bytes
) -> None:
    files = authority.issue("gateway")
    settings = {"tls_cert": files.certificate, "tls_key": files.key}
    with (
        gateway_here(loop, "127.0.0.1:1", limits={"head_timeout_s": 0.2}, **settings) as here,
        socket.create_connection(("127.0.0.1", here.port), BOUND_S) as connection,
    ):
        connection.sendall(sent)
        with suppress(ConnectionError):  # aborted
            assert connection.recv(1024) == b""


def test_who_sends_on_over_tls_after_the_answer_gets_it_and_is_cut_off(
    own_loop: LoopThread, authority: Authority
) -> None:
    files = authority.issue("gateway")
    settings = {"tls_cert": files.certificate, "tls_key": files.key}
    context = ssl.create_default_context(cafile=str(authority.ca))
    head = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 1000000\r\n\r\n"
    with (
        gateway_here(own_loop, "127.0.0.1:1", limits={"head_timeout_s": BOUND_S}, **settings) as here,
        socket.create_connection(("127.0.0.1", here.port), BOUND_S) as connection,
        context.wrap_socket(connection, server_hostname="127.0.0.1") as secured,
    ):
        secured.sendall(head)
        assert secured.recv(4096).startswith(b"HTTP/1.1 404 ")
        secured.setblocking(False)

        def has_ended() -> bool:
            own_loop.skip(BOUND_S)
            try:
                return not secured.recv(4096)
            except ssl.SSLWantReadError:
                return False
            except (ConnectionError, ssl.SSLError):  # aborted
                return True

        wait_until(has_ended)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"api_key_file": "absent"}, "api_key_file"),
        ({"decode_token_file": "absent"}, "decode_token_file"),
        ({"tls_cert": "absent", "tls_key": "absent"}, "tls_cert"),
        ({"decode_tls": True, "decode_tls_ca": "absent"}, "decode_tls"),
        ({"decode_tls": True, "decode": ("127.0.0.1:1", "127.0.0.1:2")}, "decode"),
        ({"listen": "192.0.2.1:1"}, "listen"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_followed_is_named(
    loop: LoopThread, settings: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def start() -> None:
        server = GatewayServer(GatewaySettings(**{"listen": "127.0.0.1:0", **settings}))
        try:
            await server.start()
        finally:
            await server.stop()

    with pytest.raises(ConfigError, match=rf"^{named}: "):
        loop.run(start())


def test_a_certificate_that_cannot_be_read_leaves_no_client_behind(
    loop: LoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[GatewaySettings] = []
    monkeypatch.setattr(gateway.main, "open_decode_client", opened.append)
    absent = tmp_path / "absent"

    async def build() -> None:
        GatewayServer(GatewaySettings(listen="127.0.0.1:0", tls_cert=absent, tls_key=absent))

    with pytest.raises(ConfigError, match=r"^tls_cert: "):
        loop.run(build())
    assert opened == []


def test_hosts_that_nobody_knows_end_the_start(loop: LoopThread) -> None:
    async def build() -> None:
        GatewayServer(GatewaySettings(listen="127.0.0.1:0", decode=("a..b:1", "a..c:2")))

    with pytest.raises(StartupError, match=r"^decode: "):
        loop.run(build())


@pytest.mark.parametrize(
    ("listen", "settings", "expected"),
    [
        ("0.0.0.0:0", {}, ["everything"]),
        ("0.0.0.0:0", {"api_key_file": "keys"}, ["status and metrics"]),
        ("[::]:0", {"api_key_file": "keys"}, ["status and metrics"]),
        ("0.0.0.0:0", {"api_key_file": "keys", "status_needs_key": True}, []),
        ("127.0.0.1:0", {}, []),
    ],
)
def test_what_is_open_beyond_this_machine_is_warned_about(
    loop: LoopThread, listen: str, settings: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    key_file(tmp_path, "some-long-key")
    files = {name: tmp_path / value if name.endswith("_file") else value for name, value in settings.items()}

    async def build() -> None:
        await GatewayServer(GatewaySettings(listen=listen, **files)).stop()

    with capture_logs() as log:
        loop.run(build())
    assert [line["what"] for line in log if line["event"] == "open_to_all"] == expected


@pytest.fixture
def closed(loop: LoopThread, scripted: ScriptedServer, tmp_path: Path) -> Iterator[GatewayHere]:
    """A gateway whose status page and metrics need a key too."""
    keys = key_file(tmp_path, "some-long-key", "other-long-key")
    with gateway_here(loop, scripted.address, api_key_file=keys, status_needs_key=True) as gateway:
        yield gateway


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"me:{password}".encode()).decode()


@pytest.mark.parametrize("path", ["/", "/status.json", "/metrics"])
def test_status_and_metrics_can_need_a_key(closed: GatewayHere, path: str) -> None:
    for shown in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": basic("wrong")},
        {"authorization": "Basic ?"},
    ):
        refused = closed.ask("GET", path, **shown)
        assert (refused.status, refused.headers["www-authenticate"]) == (401, 'Basic realm="Baton"')
    for known in ("Bearer some-long-key", basic("other-long-key")):
        assert closed.ask("GET", path, authorization=known).status == 200


def test_health_needs_none_and_the_api_takes_no_password(closed: GatewayHere) -> None:
    assert closed.ask("GET", "/health/live").status == 200
    assert closed.ask("GET", "/v1/models", authorization=basic("some-long-key")).status == 401


def test_a_refusal_of_a_key_has_the_callers_request_id(closed: GatewayHere) -> None:
    refused = closed.ask("GET", "/v1/models", authorization="Bearer wrong", x_request_id="mine")
    assert (refused.status, refused.headers["x-request-id"]) == (401, "mine")


def test_a_key_for_the_status_must_be_there() -> None:
    with pytest.raises(ValidationError, match="status_needs_key needs api_key_file"):
        GatewaySettings(status_needs_key=True)
