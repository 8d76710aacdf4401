"""Tests that docs/operations.md lists exactly the metrics, error reasons and log lines that the code has."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

import common.errors
from common.errors import BatonError, RowFailure
from common.grammar.grammar import GrammarKind
from common.load import EngineLoad, PoolCounts
from decode_service.messages import FinishReason
from tests.platform.pages import CODE_PACKAGES, DOCS, ROOT, all_pages, code_spans, module_name, sources, table_rows

PAGE = DOCS / "operations.md"
METRIC_KINDS = ("Counter", "Gauge", "Histogram", "Summary", "Info", "Enum")
NOTHING = EngineLoad(rows=PoolCounts(1, 1), slots=PoolCounts(1, 1), num_queued=0, num_running=0, num_steps=0)
BUILT_WITH: dict[str, Any] = {"finish_reasons": FinishReason, "grammar_kinds": GrammarKind}
WATCHED: dict[str, Any] = {"load": lambda: NOTHING, "is_ready": lambda: True}
LOG_CALL = re.compile(
    r"log(?:ger)?\.(?:(?:debug|info|warning|error|exception|critical)\(|log\([^\"()]+,)\s*\"([^\"]+)\""
)
REASON = re.compile(r"\breason\w*(?:: ClassVar\[str\])? ?= ?\"([A-Z][A-Z_]+)\"")


def modules_with_metrics() -> list[Path]:
    """Returns the modules that import a kind of metric from prometheus_client."""

    def makes_metrics(module: Path) -> bool:
        imports = (node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.ImportFrom))
        return any(
            alias.name.endswith((*METRIC_KINDS, "MetricFamily"))
            for node in imports
            if (node.module or "").startswith("prometheus_client")
            for alias in node.names
        )

    return [module for module in sources() if makes_metrics(module)]


def exporters(module: Path) -> list[type[Any]]:
    """Returns the module's classes that register metrics in a registry."""
    loaded = importlib.import_module(module_name(module))
    return [
        kind
        for _, kind in inspect.getmembers(loaded, inspect.isclass)
        if kind.__module__ == loaded.__name__ and "registry" in inspect.signature(kind.__init__).parameters
    ]


def exported_metrics() -> set[str]:
    """Returns the metrics' names as Prometheus shows them, those of histograms without their suffixes."""
    names: set[str] = set()
    for module in modules_with_metrics():
        for kind in exporters(module):
            registry = CollectorRegistry()
            taken = inspect.signature(kind.__init__).parameters
            more = {name: value for name, value in BUILT_WITH.items() if name in taken}
            metrics = kind(registry=registry, **more)
            if hasattr(metrics, "watch"):
                wanted = inspect.signature(metrics.watch).parameters
                metrics.watch(**{name: ask for name, ask in WATCHED.items() if name in wanted})
            names |= {family.name + "_total" * (family.type == "counter") for family in registry.collect()}
    return names


def metrics_in_table() -> set[str]:
    cells = [span for row in table_rows(PAGE, "metric") for span in code_spans(row[0])]
    return {span.partition("{")[0] for span in cells}


@pytest.mark.parametrize("module", modules_with_metrics(), ids=module_name)
def test_metrics_are_made_by_classes_that_take_their_registry(module: Path) -> None:
    """The test of the page creates objects of these classes to list the metrics that they export."""
    assert exporters(module)


def test_every_metric_is_in_the_table_and_every_one_there_is_exported() -> None:
    assert metrics_in_table() == exported_metrics()


def test_no_page_names_a_metric_that_is_not_exported() -> None:
    known = exported_metrics()
    known |= {name + suffix for name in known for suffix in ("_bucket", "_sum", "_count")}
    known |= {package.parent.name for package in ROOT.glob("*/__init__.py")}
    named = {name for page in all_pages() for name in re.findall(r"\bbaton_[a-z_]+[a-z]\b", page.read_text())}
    assert named - known == set()


# ---- errors ---------------------------------------------------------------------------------------------------------


def subclasses(kind: type[BatonError]) -> Iterator[type[BatonError]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def errors() -> set[type[BatonError]]:
    """Imports all modules of the services' packages, and returns all error classes."""
    for package in CODE_PACKAGES:
        if not (ROOT / package / "__init__.py").exists():
            continue
        for found in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
            if found.name.rpartition(".")[2] == "errors":
                importlib.import_module(found.name)
    return {common.errors.BatonError, *subclasses(BatonError)}


def rows_of(heading: str) -> dict[str, list[str]]:
    return {span: row for row in table_rows(PAGE, heading) for span in code_spans(row[0])}


def test_every_reason_has_a_row_and_every_row_a_reason() -> None:
    written = {reason for module in sources() for reason in REASON.findall(module.read_text())}
    assert set(rows_of("reason")) == {error.reason for error in errors()} | written


def test_a_reasons_row_names_its_code_and_its_error() -> None:
    rows = rows_of("reason")
    wrong = [
        error.__name__
        for error in errors()
        if error.code not in code_spans(rows[error.reason][1]) and error.__module__ == "common.errors"
    ]
    assert wrong == []


def test_every_row_failure_has_a_row() -> None:
    rows = rows_of("row failure")
    assert set(rows) == {failure.value for failure in RowFailure}
    become = {failure: common.errors.ROW_FAILURE_ERRORS[RowFailure(failure)].reason for failure in rows}
    assert {failure for failure in rows if become[failure] not in code_spans(rows[failure][1])} == set()


# ---- logs -----------------------------------------------------------------------------------------------------------


def test_every_line_of_the_logs_has_a_row_and_every_row_a_line() -> None:
    served = [module for module in sources() if module.relative_to(ROOT).parts[0] != "baton"]
    written = {line for module in served for line in LOG_CALL.findall(module.read_text())}
    assert set(rows_of("line")) == written


# ---- alerts ---------------------------------------------------------------------------------------------------------


def test_every_alert_has_a_row_and_every_row_an_alert() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule}
    assert set(rows_of("alert")) == alerts
