"""Tests that every metric, label and outcome in alert rules and dashboards is one that a service exports."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from common.grammar.grammar import GrammarKind
from common.telemetry.request_metrics import RequestMetrics
from decode_service.messages import FinishReason
from gateway.metrics import GatewayMetrics
from gateway.request_record import route_of
from prefill_service.handoff.handoff_metrics import HandoffMetrics
from tests.compose.panels import read_panels
from tests.platform.exports import exported

ROOT = Path(__file__).parents[2]
RULES = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
PANELS = read_panels(ROOT / "deploy/grafana/dashboards")
SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds itself."""

EXPORTED = exported()
RECORDED = {rule["record"] for group in RULES["groups"] for rule in group["rules"] if "record" in rule}


def expressions() -> Iterator[tuple[str, str]]:
    for group in RULES["groups"]:
        for rule in group["rules"]:
            yield rule.get("record") or rule["alert"], rule["expr"]
    for panel in PANELS:
        for legend, query in panel.queries.items():
            yield f"{panel.title}, {legend}", query


ALL = dict(expressions())
SELECTOR = re.compile(r"\b(baton[\w:]+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r"""(\w+)\s*(=~|=|!=|!~)\s*"([^"]*)\"""")


def selectors(expression: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Returns the metrics that a query names, each with its label matchers."""
    return [(name, MATCHER.findall(matchers)) for name, matchers in SELECTOR.findall(expression)]


@pytest.mark.parametrize("title", ALL)
def test_every_metric_named_is_exported_with_the_labels_it_is_asked_by(title: str) -> None:
    for name, matchers in selectors(ALL[title]):
        if ":" in name:
            assert name in RECORDED
            continue
        jobs = [value for label, kind, value in matchers if label == "job" and kind == "="] or list(EXPORTED)
        labels = [EXPORTED[job][name] for job in jobs if name in EXPORTED[job]]
        assert labels, f"{name} of {jobs}"
        assert {label for label, _, _ in matchers} <= set.union(*labels) | SCRAPED


@pytest.mark.parametrize("title", ALL)
def test_every_label_grouped_by_is_one_of_its_metrics(title: str) -> None:
    names = [name for name, _ in selectors(ALL[title])]
    labels = [labels for of_job in EXPORTED.values() for name, labels in of_job.items() if name in names]
    grouped = re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", ALL[title])
    assert {label.strip() for part in grouped for label in part.split(",")} <= set().union(*labels) | SCRAPED


NOT_ON_THE_DASHBOARD = {
    "baton_fused",
    "baton_handoff_lent_bytes",
    "baton_uncomputed_tokens",
    "baton_verify_steps",
    "baton_gateway_client_disconnects",
    "baton_gateway_completion_tokens",
    "baton_gateway_prompt_tokens",
    "baton_gateway_reading_requests",
}


def test_the_dashboard_shows_every_metric_but_a_few() -> None:
    def metrics(samples: Iterable[str]) -> set[str]:
        return {re.sub("_(total|bucket|sum|count|created)$", "", name) for name in samples}

    queries = [query for panel in PANELS for query in panel.queries.values()]
    shown = metrics(name for query in queries for name, _ in selectors(query) if ":" not in name)
    exported = metrics(name for of_job in EXPORTED.values() for name in of_job)
    assert exported - shown == NOT_ON_THE_DASHBOARD


NOT_THE_SERVICES_FAULT = {
    # Reasons of the request or of its sender.
    *(
        "invalid_field",
        "constraint",
        "context_exceeded",
        "duplicate_request_id",
        "unauthenticated",
        "deadline",
        "cancelled",
    ),
    # Reasons that operators know: they stopped the service. Its rows and clients continue at other services.
    "draining",
}


def outcomes(expose: Callable[[CollectorRegistry], object]) -> set[str]:
    """Returns the request outcomes that a service exposes before any request."""
    expose(registry := CollectorRegistry())
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    return {sample.labels["outcome"] for sample in samples if sample.name == "baton_requests_total"}


def outcomes_named(expressions: Iterable[str]) -> set[str]:
    return {
        outcome
        for expression in expressions
        for _, matchers in selectors(expression)
        for label, _, value in matchers
        if label == "outcome"
        for outcome in value.split("|")
    }


OF_DECODE = outcomes(lambda registry: RequestMetrics(registry, finish_reasons=FinishReason, grammar_kinds=GrammarKind))
OF_PREFILL = outcomes(HandoffMetrics)
SERVED = {reason.value for reason in FinishReason} | {"prebuilt"}


def test_outcomes_that_rules_name_are_outcomes() -> None:
    assert outcomes_named(ALL.values()) <= OF_DECODE | OF_PREFILL


def test_every_failure_of_either_service_is_in_one_ratio_or_not_its_own_fault() -> None:
    failed = outcomes_named([ALL["baton:requests_failed:ratio_rate5m"]])
    refused = outcomes_named([ALL["baton:requests_refused:ratio_rate5m"]])
    groups = (SERVED, failed, refused, NOT_THE_SERVICES_FAULT)
    assert set().union(*groups) == OF_DECODE | OF_PREFILL
    assert sum(map(len, groups)) == len(OF_DECODE | OF_PREFILL), "one is in two"


def test_the_gateway_exposes_every_status_of_the_api_before_the_first_request() -> None:
    """The expected statuses are those of the table in docs/gateway.md, 200, and 499 for clients that leave."""
    GatewayMetrics(registry := CollectorRegistry())
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    exposed = {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for sample in samples
        if sample.name == "baton_gateway_requests_total"
    }
    documented = re.findall(r"^\| (\d{3}) \|", (ROOT / "docs/gateway.md").read_text(), re.MULTILINE)
    statuses = {*documented, "200", "499"}
    versioned = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/demo", "/v1/responses")
    paths = (*versioned, "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize")
    routes = set(map(route_of, paths))
    assert exposed == {(route, status): 0.0 for route in routes for status in statuses}


def test_every_alert_has_a_test() -> None:
    alerts = {rule["alert"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
    document = yaml.safe_load((ROOT / "deploy/prometheus/rules_test.yml").read_text())
    raised = {
        case["alertname"]
        for test in document["tests"]
        for case in test.get("alert_rule_test", [])
        if "exp_alerts" in case
    }
    assert alerts == raised


def test_prometheus_looks_for_replicas_where_the_services_listen() -> None:
    document = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    found = {
        job["job_name"]: [(names["names"], names["port"]) for names in job["dns_sd_configs"]]
        for job in document["scrape_configs"]
    }
    assert found == {"prefill": [(["prefill"], 9100)], "decode": [(["decode"], 9100)], "gateway": [(["gateway"], 8000)]}
    assert document["rule_files"] == ["rules.yml"]


def test_dashboards_ask_the_datasource_that_is_provisioned() -> None:
    (source,) = yaml.safe_load((ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text())[
        "datasources"
    ]
    text = "".join(path.read_text() for path in (ROOT / "deploy/grafana/dashboards").glob("*.json"))
    assert set(re.findall(r'"type": "prometheus",\s*"uid": "([^"]*)"', text)) == {source["uid"]}
