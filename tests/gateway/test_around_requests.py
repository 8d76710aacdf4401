"""The gateway's features around its API: the status page, access for pages of other origins, and the spans of its
requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from common.config.settings import GatewaySettings
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, finished, started
from tests.gateway.gateway_here import Answer, GatewayHere, gateway_here, key_file
from tests.support.loop_thread import LoopThread
from tests.support.running_pair import wait_until
from tests.tracing.spans import EndedSpans

HELLO = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}


def test_the_page_shows_the_decode_service_that_the_gateway_has(edge: GatewayHere, scripted: ScriptedServer) -> None:
    page = edge.ask("GET", "/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")

    def decodes() -> Sequence[str]:
        shown = edge.ask("GET", "/status.json").json["decode"]
        return [each["address"] for each in shown if each["is_reachable"]]

    wait_until(lambda: decodes() == [scripted.address])


def test_the_page_can_be_switched_off(loop: LoopThread, scripted: ScriptedServer) -> None:
    with gateway_here(loop, scripted.address, status_page=False) as gateway:
        assert [gateway.ask("GET", path).status for path in ("/", "/status.json")] == [404, 404]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_every_choice_is_a_call_below_the_requests_span(
    loop: LoopThread, scripted: ScriptedServer, is_streamed: bool
) -> None:
    spans = EndedSpans()
    scripted.inference.script = [started("one"), delta([5], "x"), finished()]
    with gateway_here(loop, scripted.address, tracer=spans.tracer) as gateway:
        answer = gateway.ask("POST", "/v1/chat/completions", {**HELLO, "n": 2, "stream": is_streamed})
        assert answer.status == 200
        wait_until(lambda: bool(spans.all))
    (span,) = spans.all
    expected = f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}"
    calls = [scripted.inference.metadata.get(timeout=BOUND_S) for _ in range(2)]
    assert [call["traceparent"].rpartition("-")[0] for call in calls] == [expected] * 2


ORIGIN, OTHER = "https://chat.example", "https://other.example"


def preflight(gateway: GatewayHere, origin: str, path: str = "/v1/chat/completions") -> Answer:
    """Sends the preflight request that a browser sends before a page's own request. It carries no key."""
    asked = {
        "origin": origin,
        "access_control_request_method": "POST",
        "access_control_request_headers": "authorization,content-type,x-stainless-os",
    }
    return gateway.ask("OPTIONS", path, **asked)


@pytest.fixture
def shared(loop: LoopThread, scripted: ScriptedServer, tmp_path: Path) -> Iterator[GatewayHere]:
    """A gateway with an API key, whose API the pages of one other origin may call."""
    keys = key_file(tmp_path, "some-long-key")
    scripted.inference.script = [started(), delta([5], "x"), finished()]
    with gateway_here(loop, scripted.address, api_key_file=keys, cors_origins=(ORIGIN,)) as gateway:
        yield gateway


def test_a_page_of_an_origin_that_may_is_answered(shared: GatewayHere) -> None:
    asked = preflight(shared, ORIGIN)
    assert (asked.status, asked.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "POST" in asked.headers["access-control-allow-methods"]
    allowed = asked.headers["access-control-allow-headers"].lower()
    assert all(name in allowed for name in ("authorization", "content-type", "x-stainless-os"))
    for key, status in (("Bearer some-long-key", 200), ("Bearer other", 401)):
        answer = shared.ask("POST", "/v1/chat/completions", HELLO, authorization=key, origin=ORIGIN)
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()


def test_a_page_of_another_origin_is_not(shared: GatewayHere) -> None:
    asked = preflight(shared, OTHER)
    assert (asked.status, "access-control-allow-origin" in asked.headers) == (400, False)
    answer = shared.ask("POST", "/v1/chat/completions", HELLO, authorization="Bearer some-long-key", origin=OTHER)
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/metrics"])
def test_a_refused_page_is_an_error_like_any_other_with_a_line_of_the_log(shared: GatewayHere, path: str) -> None:
    with capture_logs() as lines:
        refusal = preflight(shared, OTHER, path)
        wait_until(lambda: any(line["event"] == "request_finished" for line in lines))
    assert (refusal.status, refusal.headers["content-type"]) == (400, "application/json")
    error = refusal.json["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "origin_not_allowed")
    assert "cors_origins" in error["message"]
    (line,) = [line for line in lines if line["event"] == "request_finished"]
    assert (line["log_level"], line["status"], line["error_code"]) == ("info", 400, "origin_not_allowed")


def test_no_page_of_another_origin_may_without_the_setting(edge: GatewayHere) -> None:
    assert "access-control-allow-origin" not in preflight(edge, ORIGIN).headers


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://chat.example/path", "null", "**"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match="is neither an origin"):
        GatewaySettings(cors_origins=(origin,))
