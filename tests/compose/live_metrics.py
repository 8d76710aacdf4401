"""Prometheus next to a running pair: it finds every replica, and the queries of every panel have an answer."""

from __future__ import annotations

from pathlib import Path

from tests.compose.command import wait_until
from tests.compose.panels import Panel, Prometheus, legend, read_panels
from tests.compose.project import Project
from tests.compose.report import Report

_SCRAPED_TIMEOUT_S = 60
_SHOWN_SERIES = 6


def find_targets(project: Project, expected: dict[str, int], report: Report) -> Prometheus:
    with report.step(f"Prometheus finds {expected}"):
        (container,) = project.containers("prometheus")
        prometheus = Prometheus(container.port(9090))
        wait_until(f"targets {expected}", lambda: _up(prometheus) == expected, timeout_s=_SCRAPED_TIMEOUT_S)
    return prometheus


def _up(prometheus: Prometheus) -> dict[str, int]:
    try:
        return prometheus.targets_up()
    except OSError:
        return {}


def list_panels(prometheus: Prometheus, dashboards: Path, report: Report) -> None:
    """Prints each panel with the values it shows. A panel without data is a problem."""
    with report.step("every panel has data"):
        panels = read_panels(dashboards)
        num_queries = sum(len(panel.queries) for panel in panels)
        for panel in panels:
            report.note(f"{panel.title}: {'; '.join(_shown(prometheus, panel, report))}")
        report.note(f"{len(panels)} panels, {num_queries} queries")


def _shown(prometheus: Prometheus, panel: Panel, report: Report) -> list[str]:
    shown = []
    for template, expression in panel.queries.items():
        series = prometheus.query(expression)
        if not series:
            report.problem(f"{panel.title}, {template!r}: no data for {expression}")
        shown += [f"{legend(template, labels)} {value:.4g}" for labels, value in series[:_SHOWN_SERIES]]
        if len(series) > _SHOWN_SERIES:
            shown.append(f"and {len(series) - _SHOWN_SERIES} more")
    return shown
