"""Tests that HTTP which servers and proxies could read in different ways is refused, and its connection closed."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from baton import Client, errors
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, finished, started
from tests.gateway.gateway_here import BODY, COMPLETIONS, GatewayHere, gateway_here, key_file, post
from tests.support.loop_thread import LoopThread

HOSTNAME = socket.gethostname().encode()
SMUGGLED = b"0\r\n\r\nGET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"


def get(target: bytes, *lines: bytes, version: bytes = b"1.1") -> bytes:
    return b"\r\n".join([b"GET " + target + b" HTTP/" + version, *lines, b"", b""])


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"what\r\n\r\n", 400),
        (get(b"/", b"no colon"), 400),
        (get(b"/"), 400),
        (get(b"/", b"host: localhost", b"host: localhost"), 400),
        (get(b"/", b"host:"), 400),
        (get(b"/", b"host: a b"), 400),
        (get(b"/", b"host: a/b"), 400),
        (get(b"/", b"host: user@a"), 400),
        (get(b"/", b"host: a:b"), 400),
        (get(b"/", b"host: a:65536"), 400),
        (get(b"/", b"host: [::1"), 400),
        (get(b"/", b"host: \xe4"), 400),
        (get(b"/", b"host: localhost", version=b"2.0"), 505),
        (get(b"/", b"host: localhost", version=b"0.9"), 505),
        (get(b"/", b"host: localhost", version=b"1.2"), 505),
        (get(b"health", b"host: localhost"), 400),
        (get(b"*", b"host: localhost"), 400),
        (get(b"ftp://x/", b"host: localhost"), 400),
        (get(b"http:///health", b"host: localhost"), 400),
        (get(b"http://user@x/health", b"host: localhost"), 400),
        (get(b"/#there", b"host: localhost", b"content-length: 0", b"transfer-encoding: chunked"), 400),
        (post(BODY, "transfer-encoding: chunked") + SMUGGLED, 400),
        (post(BODY, "content-length: 3"), 400),
        (post(BODY, "transfer-encoding: gzip, chunked"), 400),
        (get(b"/", b"transfer-encoding: chunked", version=b"1.0") + SMUGGLED, 400),
    ],
    ids=lambda value: repr(value)[2:60] if isinstance(value, bytes) else "",
)
def test_it_is_refused_and_the_connection_closed(edge: GatewayHere, sent: bytes, status: int) -> None:
    with capture_logs() as lines:
        refused = edge.send_raw(sent)
    assert (refused.status, refused.error["type"]) == (status, "invalid_request_error")
    assert refused.headers["connection"] == "close"
    (line,) = [line for line in lines if line["event"] == "http_refused"]
    assert line["status"] == status and line["error"]


def test_the_log_quotes_nothing_of_a_line_that_is_none(edge: GatewayHere) -> None:
    with capture_logs() as lines:
        edge.send_raw(get(b"/", b"host: localhost", b"authorization : hidden"))
    assert [line["error"] for line in lines if line["event"] == "http_refused"] == ["illegal header line"]


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize(
    ("target", "host"),
    [
        (b"http://other.localhost/health/live", b"host: localhost"),
        (b"HTTP://[::1]:8000/health/live?a=b", b"host: [::1]:8000"),
        (b"https://a_b.localhost:1/health/live", b"host: a_b.localhost:1"),
        (b"/health/live", b"host: 127.0.0.1:8000"),
    ],
)
def test_a_target_may_name_its_host(edge: GatewayHere, target: bytes, host: bytes, version: bytes) -> None:
    answer = edge.send_raw(get(target, host, b"connection: close", version=version))
    assert (answer.status, answer.json) == (200, {"status": "ok"})


def test_a_host_without_a_path_is_its_root(edge: GatewayHere) -> None:
    answer = edge.send_raw(get(b"http://localhost", b"host: localhost", b"connection: close"))
    assert answer.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize("path", [b"/", b"/metrics", b"/health/live", b"/v1/models", b"/nowhere"])
def test_a_page_that_points_its_domain_at_loopback_gets_nothing(edge: GatewayHere, path: bytes) -> None:
    heads = (
        (path, b"host: rebind.example"),
        (path, b"host: REBIND.example.:8000"),
        (path, b"host: 127.0.0.1.rebind.example"),
        (path, b"host: localhost.rebind.example"),
        (b"http://rebind.example" + path, b"host: localhost"),
    )
    for target, host in heads:
        refused = edge.send_raw(get(target, host, b"connection: close"))
        assert (refused.status, refused.error["code"]) == (403, "host_not_allowed"), host
    own = (
        b"LOCALHOST:1",
        b"localhost.",
        b"a.localhost",
        b"127.1.2.3",
        b"[::1]:8000",
        b"host.docker.internal",
        HOSTNAME,
    )
    for host in own:
        assert edge.send_raw(get(path, b"host: " + host, b"connection: close")).status != 403, host
    assert edge.send_raw(get(path, b"connection: close", version=b"1.0")).status != 403


def test_hosts_may_be_allowed(loop: LoopThread, scripted: ScriptedServer, tmp_path: Path) -> None:
    with gateway_here(loop, scripted.address, api_key_file=key_file(tmp_path, "some-long-key")) as keyed:
        answer = keyed.send_raw(get(b"/health/live", b"host: proxy.example", b"connection: close"))
        assert answer.status == 200, "a page has no key"
    for allowed, status in ((("API.example", "b.example"), 403), (("*",), 200)):
        with gateway_here(loop, scripted.address, allowed_hosts=allowed) as gateway:
            for host, expected in ((b"api.example:80", 200), (b"127.0.0.1", 200), (b"c.example", status)):
                answer = gateway.send_raw(get(b"/health/live", b"host: " + host, b"connection: close"))
                assert answer.status == expected, host


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "identity, gzip", "nonsense"])
def test_a_body_that_is_coded_is_refused_by_the_codings_field(edge: GatewayHere, coding: str) -> None:
    answer = edge.ask("POST", COMPLETIONS, BODY, content_encoding=coding)
    assert (answer.status, answer.error["param"]) == (415, "content-encoding")
    assert answer.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("kind", ["", "text/json", "application/jsonx", "application/json; charset=utf-16"])
def test_a_body_of_another_kind_is_refused(edge: GatewayHere, kind: str) -> None:
    answer = edge.ask("POST", COMPLETIONS, BODY, content_type=kind)
    assert (answer.status, answer.error["param"]) == (415, "content-type")


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON;charset=UTF-8", 'application/json; charset="utf-8"']
)
def test_a_body_as_it_is_is_read(edge: GatewayHere, scripted: ScriptedServer, kind: str) -> None:
    scripted.inference.script = [started(), delta([1], "a"), finished()]
    assert edge.ask("POST", COMPLETIONS, BODY, content_type=kind, content_encoding="identity").status == 200


def test_a_client_of_grpc_is_told_what_answers_here(edge: GatewayHere) -> None:
    with Client(f"127.0.0.1:{edge.port}", rpc_timeout_s=BOUND_S) as client, pytest.raises(errors.BatonError) as caught:
        client.model_info()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert str(caught.value).startswith(f"127.0.0.1:{edge.port} speaks HTTP/1 and no gRPC: it may be Baton's gateway")
