"""The gateway's endpoints for health, models and metrics."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import openai
import pytest
from structlog.testing import capture_logs

from baton.client import asynchronous
from baton.client.servers import ANSWER_TIMEOUT_S
from baton.v1 import inference_pb2
from gateway.app import HEALTH_TIMEOUT_S
from tests.client.scripted_inference import BOUND_S, ScriptedServer, delta, finished, started
from tests.gateway.gateway_here import BODY, GatewayHere, gateway_here
from tests.support.black_hole import BlackHoleProxy
from tests.support.loop_thread import LoopThread
from tests.support.running_pair import wait_until

COMPLETIONS = "/v1/completions"


def test_health_is_the_decode_services(edge: GatewayHere, scripted: ScriptedServer) -> None:
    answer = edge.ask("GET", "/health")
    assert (answer.status, answer.json["reason"]) == (503, "the decode service is not ready")
    assert edge.ask("GET", "/health/ready").json == answer.json
    scripted.become_ready()
    answer = edge.ask("GET", "/health")
    assert (answer.status, answer.json) == (200, {"status": "ok"})
    assert edge.ask("GET", "/health/ready").status == 200
    scripted.stop()
    answer = edge.ask("GET", "/health")
    assert answer.status == 503 and answer.json["reason"].startswith("the decode service cannot be reached")
    assert edge.ask("GET", "/health/live").status == 200


def test_health_is_another_services_while_one_hangs(
    loop: LoopThread, scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ScriptedServer()
    for server in (scripted, other):
        server.become_ready()
        server.inference.script = [started(), finished()]
    host, _, port = scripted.address.rpartition(":")
    monkeypatch.setattr(asynchronous, "ANSWER_TIMEOUT_S", 5.0)
    with BlackHoleProxy() as proxy:
        proxy.target = (host, int(port))
        with gateway_here(loop, proxy.address, other.address) as gateway:
            wait_until(lambda: gateway.ask("POST", COMPLETIONS, BODY) and not scripted.inference.requests.empty())
            proxy.cut()
            statuses = [gateway.ask("GET", "/health").status for _ in range(4)]
    other.stop()
    assert statuses == [200] * 4
    assert HEALTH_TIMEOUT_S > ANSWER_TIMEOUT_S + 1.0, "another service has time to answer"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping_is_health(edge: GatewayHere, scripted: ScriptedServer, method: str) -> None:
    assert edge.ask(method, "/ping").status == 503
    scripted.become_ready()
    assert edge.ask(method, "/ping").status == 200


def test_the_version_is_the_distributions(edge: GatewayHere) -> None:
    assert edge.ask("GET", "/version").json == {"version": version("baton-serve")}


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("POST", COMPLETIONS, {"model": "demo", "prompt": "hidden", "nonsense": 1}, ("nonsense", "unknown_parameter")),
        ("POST", COMPLETIONS, {"model": "demo", "prompt": "hidden", "temperature": "x"}, ("temperature", None)),
        ("POST", COMPLETIONS, {"model": "x" * 5000, "prompt": "hidden"}, ("model", "model_not_found")),
        ("POST", COMPLETIONS, b"hidden", (None, "invalid_json")),
        ("GET", "/nope", None, (None, "unknown_url")),
        ("GET", COMPLETIONS, None, (None, "wrong_method")),
    ],
    ids=["unknown", "wrong", "model", "json", "route", "method"],
)
def test_the_log_says_why_a_request_was_refused(
    edge: GatewayHere, method: str, path: str, body: Any, expected: tuple[str | None, str | None]
) -> None:
    with capture_logs() as lines:
        answer = edge.ask(method, path, body, authorization="Bearer hidden")
        wait_until(lambda: any(line["event"] == "request_finished" for line in lines))
    (line,) = [line for line in lines if line["event"] == "request_finished"]
    assert (line["status"], line["log_level"]) == (answer.status, "info")
    assert (line["error_param"], line["error_code"]) == expected
    assert answer.error["message"].startswith(line["error"]) and len(line["error"]) <= 256
    assert "hidden" not in str(line)


def test_the_model_has_the_services_name(edge: GatewayHere) -> None:
    client = edge.openai()
    (model,) = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("demo", "model", "baton")
    assert client.models.retrieve("demo") == model
    assert model.max_model_len == 8192  # type: ignore[attr-defined]  # beyond OpenAI's


def test_the_model_has_all_names_of_the_setting_and_answers_have_the_first(
    loop: LoopThread, scripted: ScriptedServer
) -> None:
    scripted.inference.script = [started(), finished()]
    with gateway_here(loop, scripted.address, served_model_name="org/model,gpt-4o, org/model") as gateway:
        client = gateway.openai()
        assert [model.id for model in client.models.list()] == ["org/model", "gpt-4o"]
        assert [client.models.retrieve(name).id for name in ("org/model", "gpt-4o")] == ["org/model", "gpt-4o"]
        for name in ("org/model", "gpt-4o"):
            assert client.completions.create(model=name, prompt="hi").model == "org/model"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="demo", prompt="hi")


def test_the_usage_counts_drafts_of_all_choices(edge: GatewayHere, scripted: ScriptedServer) -> None:
    counts = inference_pb2.SpeculationCounts(
        num_verify_steps=3, num_drafted_tokens=12, num_accepted_tokens=5, num_forced_tokens=2
    )
    scripted.inference.script = [started(), delta([1, 2], "ab"), finished(speculation=counts)]
    answer = edge.ask("POST", COMPLETIONS, {"model": "demo", "prompt": "hi", "n": 2})
    details = answer.json["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": 0, "draft_tokens": 24, "accepted_draft_tokens": 10, "forced_draft_tokens": 4}


def test_metrics_count_requests_tokens_and_times(edge: GatewayHere, scripted: ScriptedServer) -> None:
    scripted.inference.script = [started(), delta([1, 2], "ab"), delta([3], "c"), finished(num_completion_tokens=3)]
    edge.openai().completions.create(model="demo", prompt="hi", n=2)
    edge.ask("POST", COMPLETIONS, {"model": "demo"})
    edge.ask("GET", "/nowhere/7")
    assert edge.metric("baton_gateway_requests_total", route=COMPLETIONS, status="200") == 1
    assert edge.metric("baton_gateway_requests_total", route=COMPLETIONS, status="400") == 1
    assert edge.metric("baton_gateway_requests_total", route="other", status="404") == 1
    assert edge.metric("baton_gateway_request_seconds_count", route=COMPLETIONS) == 2
    assert edge.metric("baton_gateway_ttft_seconds_count", route=COMPLETIONS) == 1
    assert edge.metric("baton_gateway_prompt_tokens_total") == 3, "once a prompt"
    assert edge.metric("baton_gateway_completion_tokens_total") == 6
    assert edge.metric("baton_gateway_client_disconnects_total") == 0
    assert edge.ask("GET", "/metrics").headers["content-type"].startswith("text/plain")


def test_the_status_page_has_the_models_names_the_version_and_the_errors(
    loop: LoopThread, scripted: ScriptedServer
) -> None:
    with gateway_here(loop, scripted.address, served_model_name="a,b") as gateway:
        assert gateway.ask("GET", "/health").status == 503, "no error: it asks whether a service is ready"
        scripted.become_ready()
        assert gateway.ask("POST", COMPLETIONS, {"model": "a"}).status == 400
        assert gateway.ask("POST", COMPLETIONS, {"model": "c", "prompt": "hi"}).status == 404
        assert gateway.ask("GET", "/nowhere").status == 404
        shown = gateway.ask("GET", "/status.json").json["gateway"]
    assert shown == {"version": version("baton-serve"), "model_names": ["a", "b"], "errors": {"400": 1, "404": 2}}


def test_every_answer_has_its_request_id(edge: GatewayHere) -> None:
    assert edge.ask("GET", "/health", x_request_id="mine").headers["x-request-id"] == "mine"
    first, second = (edge.ask("GET", path).headers["x-request-id"] for path in ("/health", "/nope"))
    assert first != second


def test_the_callers_request_id_begins_those_of_the_generations(edge: GatewayHere, scripted: ScriptedServer) -> None:
    scripted.inference.script = [started(), finished()]
    body = {"model": "demo", "prompt": "hi", "n": 2}
    for _ in range(2):
        assert edge.ask("POST", COMPLETIONS, body, x_request_id="mine").status == 200
    seen = [scripted.inference.requests.get(timeout=BOUND_S).request_id for _ in range(4)]
    assert len(set(seen)) == 4, "the same id may be sent twice"
    assert all(each.startswith("mine-") for each in seen)


@pytest.mark.parametrize(("path", "is_told"), [("/chat/completions", True), ("/models", True), ("/nope", False)])
def test_a_path_without_its_version_is_told_where_it_is(edge: GatewayHere, path: str, is_told: bool) -> None:
    answer = edge.ask("POST", path, {})
    assert answer.status == 404
    assert (f"/v1{path} is: the base URL ends with /v1" in answer.error["message"]) == is_told


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models/demo/", "/health/live/"])
def test_a_path_may_end_with_a_slash(edge: GatewayHere, path: str) -> None:
    assert edge.ask("GET", path).body == edge.ask("GET", path.removesuffix("/")).body
    assert edge.ask("GET", path).status == 200
