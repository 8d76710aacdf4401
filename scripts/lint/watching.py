"""Alert rules and dashboards name only metrics, labels and outcomes that a service exports, and every one of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from common.grammar.grammar import GrammarKind
from common.telemetry.metrics import RequestMetrics
from decode_service.messages import FinishReason
from gateway.request_record import GatewayMetrics, route_of
from prefill_service.edge.observer import HandoffMetrics
from scripts.lint.exports import exported
from scripts.lint.problem import ROOT, Problem, set_apart, unequal
from tests.compose.panels import read_panels

PROMETHEUS = ROOT / "deploy/prometheus"
RULES_FILE = PROMETHEUS / "rules.yml"
GRAFANA = ROOT / "deploy/grafana"
DASHBOARDS = GRAFANA / "dashboards"
GATEWAY_PAGE = ROOT / "docs/gateway.md"
ADDED_BY_PROMETHEUS = {"job", "instance"}
NOT_ON_THE_DASHBOARD = {
    "baton_fused",
    "baton_grpc_port",
    "baton_handoff_lent_bytes",
    "baton_uncomputed_tokens",
    "baton_verify_steps",
    "baton_gateway_client_disconnects",
    "baton_gateway_completion_tokens",
    "baton_gateway_prompt_tokens",
    "baton_gateway_reading_requests",
}
REQUESTS_FAULT = {
    "invalid_field",
    "constraint",
    "context_exceeded",
    "duplicate_request_id",
    "unauthenticated",
    "deadline",
    "cancelled",
    "draining",  # the operators' doing; its rows and clients continue at other services
}
"""Outcomes that are no failure of the service."""
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/demo",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)

_GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES_FILE.read_text())["groups"]
_ALERTS_AND_RECORDS: list[dict[str, str]] = [rule for group in _GROUPS for rule in group["rules"]]
_PANELS = read_panels(DASHBOARDS)
_EXPRESSIONS = {rule.get("record") or rule["alert"]: rule["expr"] for rule in _ALERTS_AND_RECORDS} | {
    f"{panel.title}, {legend}": query for panel in _PANELS for legend, query in panel.queries.items()
}
"""The queries of all rules and panels by their titles."""

Matchers = list[tuple[str, str, str]]
"""Labels, each with the kind of comparison and the value."""


def queries_ask_for_metrics_that_are_exported_by_labels_that_they_have() -> Iterator[Problem]:
    recorded = {rule["record"] for rule in _ALERTS_AND_RECORDS if "record" in rule}
    for title, expression in _EXPRESSIONS.items():
        all_labels: set[str] = set(ADDED_BY_PROMETHEUS)
        for name, matchers in _selectors(expression):
            jobs = [value for label, kind, value in matchers if label == "job" and kind == "="] or list(exported())
            labels = [exported()[job][name] for job in jobs if name in exported()[job]]
            if name in recorded:
                continue
            if not labels:
                yield Problem(RULES_FILE, 0, f"{title}: {name} is not exported by {', '.join(jobs)}")
            of_all_jobs = [of_job[name] for of_job in exported().values() if name in of_job]
            all_labels = all_labels.union(*of_all_jobs)
            for label in sorted({label for label, _, _ in matchers}.difference(ADDED_BY_PROMETHEUS, *labels)):
                yield Problem(RULES_FILE, 0, f"{title}: {name} has no label {label}")
        grouped = re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression)
        for label in sorted({label.strip() for part in grouped for label in part.split(",")} - all_labels):
            yield Problem(RULES_FILE, 0, f"{title}: groups by {label}, which its metrics have not")


def the_dashboard_shows_every_metric_but_a_few() -> Iterator[Problem]:
    def metrics(samples: Iterable[str]) -> set[str]:
        return {re.sub("_(total|bucket|sum|count|created)$", "", name) for name in samples}

    queries = [query for panel in _PANELS for query in panel.queries.values()]
    shown = metrics(name for query in queries for name, _ in _selectors(query) if ":" not in name)
    there = metrics(name for of_job in exported().values() for name in of_job)
    for name in sorted((there - shown) ^ NOT_ON_THE_DASHBOARD):
        wrong = "is on no panel" if name in there - shown else "is on a panel, or not exported"
        yield Problem(DASHBOARDS / "pair.json", 0, f"{name} {wrong}; see NOT_ON_THE_DASHBOARD")


def every_outcome_is_in_one_ratio_or_not_the_services_fault() -> Iterator[Problem]:
    decode = _outcomes(
        lambda registry: RequestMetrics(registry, finish_reasons=FinishReason, grammar_kinds=GrammarKind)
    )
    outcomes = decode | _outcomes(HandoffMetrics)
    served = {reason.value for reason in FinishReason} | {"prebuilt"}
    failed, refused = (
        _outcomes_named([_EXPRESSIONS[f"baton:requests_{what}:ratio_rate5m"]]) for what in ("failed", "refused")
    )
    yield from set_apart(RULES_FILE, "outcome", served | failed | refused | REQUESTS_FAULT, outcomes)
    num_named = sum(map(len, (served, failed, refused, REQUESTS_FAULT)))
    yield from unequal(RULES_FILE, "outcomes, each in one group", num_named, len(outcomes))
    for outcome in sorted(_outcomes_named(_EXPRESSIONS.values()) - outcomes):
        yield Problem(RULES_FILE, 0, f"outcome {outcome} does not exist")


def the_gateway_exposes_every_status_of_its_page_before_the_first_request() -> Iterator[Problem]:
    """The page leaves out 200, and 499 for clients that leave."""
    GatewayMetrics(registry := CollectorRegistry())
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    requests = [sample.labels for sample in samples if sample.name == "baton_gateway_requests_total"]
    statuses = {*re.findall(r"^\| (\d{3}) \|", GATEWAY_PAGE.read_text(), re.MULTILINE), "200", "499"}
    wanted = {f"{status} of {route_of(path)}" for path in PATHS for status in statuses}
    there = {f"{labels['status']} of {labels['route']}" for labels in requests}
    yield from set_apart(ROOT / "gateway/request_record.py", "status", there, wanted)


def every_alert_has_a_test() -> Iterator[Problem]:
    file = PROMETHEUS / "rules_test.yml"
    cases = [case for test in yaml.safe_load(file.read_text())["tests"] for case in test.get("alert_rule_test", [])]
    raised = {case["alertname"] for case in cases if "exp_alerts" in case}
    yield from set_apart(file, "alert", raised, {rule["alert"] for rule in _ALERTS_AND_RECORDS if "alert" in rule})


def prometheus_looks_for_replicas_where_the_services_listen() -> Iterator[Problem]:
    file = PROMETHEUS / "prometheus.yml"
    document = yaml.safe_load(file.read_text())
    for job, port in (("prefill", 9100), ("decode", 9100), ("gateway", 8000)):
        (found,) = [each["dns_sd_configs"] for each in document["scrape_configs"] if each["job_name"] == job]
        places = [(names["names"], names["port"]) for names in found]
        yield from unequal(file, job, places, [([job], port)])
    yield from unequal(file, "jobs", len(document["scrape_configs"]), 3)
    yield from unequal(file, "rules", document["rule_files"], [RULES_FILE.name])


def dashboards_ask_the_datasource_that_is_provisioned() -> Iterator[Problem]:
    provisioned = GRAFANA / "provisioning/datasources/prometheus.yaml"
    (source,) = yaml.safe_load(provisioned.read_text())["datasources"]
    for path in sorted(DASHBOARDS.glob("*.json")):
        asked = set(re.findall(r'"type": "prometheus",\s*"uid": "([^"]*)"', path.read_text()))
        yield from unequal(path, "datasources", asked, {source["uid"]})


def _selectors(expression: str) -> list[tuple[str, Matchers]]:
    """Returns the metrics that a query names, each with its label matchers."""
    return [
        (name, re.findall(r"""(\w+)\s*(=~|=|!=|!~)\s*"([^"]*)\"""", matchers))
        for name, matchers in re.findall(r"\b(baton[\w:]+)(?:\{([^}]*)\})?", expression)
    ]


def _outcomes(expose: Callable[[CollectorRegistry], object]) -> set[str]:
    """Returns the request outcomes that a service exposes before any request."""
    expose(registry := CollectorRegistry())
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    return {sample.labels["outcome"] for sample in samples if sample.name == "baton_requests_total"}


def _outcomes_named(expressions: Iterable[str]) -> Set[str]:
    return {
        outcome
        for expression in expressions
        for _, matchers in _selectors(expression)
        for label, _, value in matchers
        if label == "outcome"
        for outcome in value.split("|")
    }
