"""docs/operations.md lists exactly the metrics, error reasons, log lines and alerts that there are."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

import common.errors
from common.errors import BatonError, RowFailure
from common.grammar.grammar import GrammarKind
from common.telemetry.stats import EngineLoad, PoolCounts
from decode_service.messages import FinishReason
from scripts.lint.pages import CODE_PACKAGES, DOCS, all_pages, code_spans, module_name, sources, table_rows
from scripts.lint.problem import ROOT, Problem, line_of, set_apart

PAGE = DOCS / "operations.md"
_METRIC_KINDS = ("Counter", "Gauge", "Histogram", "Summary", "Info", "Enum", "MetricFamily")
_NOTHING = EngineLoad(rows=PoolCounts(1, 1), slots=PoolCounts(1, 1), num_queued=0, num_running=0, num_steps=0)
_BUILT_WITH: dict[str, Any] = {"finish_reasons": FinishReason, "grammar_kinds": GrammarKind}
_WATCHED: dict[str, Any] = {"load": lambda: _NOTHING, "is_ready": lambda: True}
_LOG_CALL = re.compile(
    r"log(?:ger)?\.(?:(?:debug|info|warning|error|exception|critical)\(|log\([^\"()]+,)\s*\"([^\"]+)\""
)
_REASON = re.compile(r"\breason\w*(?:: ClassVar\[str\])? ?= ?\"([A-Z][A-Z_]+)\"")


# ---- metrics --------------------------------------------------------------------------------------------------------


def metrics_are_made_by_classes_that_take_their_registry() -> Iterator[Problem]:
    """The other rules create objects of these classes to list the metrics that they export."""
    for module in _modules_with_metrics():
        if not _exporters(module):
            yield Problem(module, 0, "metrics are made by a class that takes a registry")


def the_page_has_every_metric() -> Iterator[Problem]:
    cells = [span for row in table_rows(PAGE, "metric") for span in code_spans(row[0])]
    yield from set_apart(PAGE, "metric", {span.partition("{")[0] for span in cells}, exported_metrics())


def pages_name_metrics_that_are_exported() -> Iterator[Problem]:
    known = {name + suffix for name in exported_metrics() for suffix in ("", "_bucket", "_sum", "_count")}
    known |= {package.parent.name for package in ROOT.glob("*/__init__.py")}
    for page in all_pages():
        text = page.read_text()
        for name in sorted({*re.findall(r"\bbaton_[a-z_]+[a-z]\b", text)} - known):
            yield Problem(page, line_of(text, name), f"metric {name} is not exported")


@cache
def exported_metrics() -> frozenset[str]:
    """Returns the metrics' names as Prometheus shows them, those of histograms without their suffixes."""
    names: set[str] = set()
    for module in _modules_with_metrics():
        for kind in _exporters(module):
            registry = CollectorRegistry()
            metrics = kind(registry=registry, **_wanted_by(kind.__init__, _BUILT_WITH))
            if hasattr(metrics, "watch"):
                metrics.watch(**_wanted_by(metrics.watch, _WATCHED))
            names |= {family.name + "_total" * (family.type == "counter") for family in registry.collect()}
    return frozenset(names)


def _wanted_by(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    wanted = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in wanted}


def _modules_with_metrics() -> list[Path]:
    """Returns the modules that import a kind of metric from prometheus_client."""

    def makes_metrics(module: Path) -> bool:
        imports = (node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.ImportFrom))
        return any(
            alias.name.endswith(_METRIC_KINDS)
            for node in imports
            if (node.module or "").startswith("prometheus_client")
            for alias in node.names
        )

    return [module for module in sources() if "prometheus_client" in module.read_text() and makes_metrics(module)]


def _exporters(module: Path) -> list[type[Any]]:
    """Returns the module's classes that register metrics in a registry."""
    loaded = importlib.import_module(module_name(module))
    return [
        kind
        for _, kind in inspect.getmembers(loaded, inspect.isclass)
        if kind.__module__ == loaded.__name__ and "registry" in inspect.signature(kind.__init__).parameters
    ]


# ---- errors ---------------------------------------------------------------------------------------------------------


def the_page_has_every_reason() -> Iterator[Problem]:
    written = {reason for module in sources() for reason in _REASON.findall(module.read_text())}
    yield from set_apart(PAGE, "reason", _rows_of("reason").keys(), {error.reason for error in _errors()} | written)


def a_reasons_row_names_the_code_of_its_error() -> Iterator[Problem]:
    rows = _rows_of("reason")
    for error in _errors():
        row = rows.get(error.reason)
        if row and error.__module__ == "common.errors" and error.code not in code_spans(row[1]):
            yield Problem(PAGE, line_of(PAGE.read_text(), f"| `{error.reason}`"), f"{error.reason} has {error.code}")


def the_page_has_every_row_failure_with_its_reason() -> Iterator[Problem]:
    rows = _rows_of("row failure")
    yield from set_apart(PAGE, "row failure", rows.keys(), {failure.value for failure in RowFailure})
    for failure, error in common.errors.ROW_FAILURE_ERRORS.items():
        if failure in rows and error.reason not in code_spans(rows[failure][1]):
            yield Problem(PAGE, line_of(PAGE.read_text(), f"| `{failure}`"), f"{failure} becomes {error.reason}")


def _errors() -> set[type[BatonError]]:
    """Imports the modules of errors of all packages, and returns all error classes."""
    for package in CODE_PACKAGES:
        for found in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
            if found.name.rpartition(".")[2] == "errors":
                importlib.import_module(found.name)
    return {BatonError, *_subclasses(BatonError)}


def _subclasses(kind: type[BatonError]) -> Iterator[type[BatonError]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _rows_of(heading: str) -> dict[str, list[str]]:
    return {span: row for row in table_rows(PAGE, heading) for span in code_spans(row[0])}


# ---- logs and alerts ------------------------------------------------------------------------------------------------


def the_page_has_every_line_of_the_logs() -> Iterator[Problem]:
    served = [module for module in sources() if module.relative_to(ROOT).parts[0] != "baton"]
    written = {line for module in served for line in _LOG_CALL.findall(module.read_text())}
    yield from set_apart(PAGE, "log line", _rows_of("line").keys(), written)


def the_page_has_every_alert() -> Iterator[Problem]:
    groups = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    yield from set_apart(PAGE, "alert", _rows_of("alert").keys(), alerts)
