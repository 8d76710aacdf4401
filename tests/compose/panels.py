"""The dashboards' panels, and the answers of a running Prometheus to their queries."""

from __future__ import annotations

import json
import math
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLES = {"$__rate_interval": "1m", "$__range": "15m"}
"""Values for the variables that Grafana would fill in."""


@dataclass(frozen=True)
class Panel:
    title: str
    queries: Mapping[str, str]
    """The panel's queries, by their legend."""


def read_panels(directory: Path) -> list[Panel]:
    """Returns all panels that have queries."""
    panels = []
    for path in sorted(directory.glob("*.json")):
        dashboard = json.loads(path.read_text())
        for panel in dashboard["panels"]:
            queries = {target["legendFormat"]: target["expr"] for target in panel.get("targets", [])}
            if queries:
                panels.append(Panel(panel["title"], queries))
    return panels


class Prometheus:
    """A Prometheus that runs on this host's `port`."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Returns the labels and the current value of each series. NaN values are left out."""
        for variable, value in VARIABLES.items():
            expression = expression.replace(variable, value)
        samples = self._get(f"query?{urllib.parse.urlencode({'query': expression})}")["result"]
        found = [(sample["metric"], float(sample["value"][1])) for sample in samples]
        return [(labels, value) for labels, value in found if not math.isnan(value)]

    def targets_up(self) -> dict[str, int]:
        """Returns the number of targets of each job that respond."""
        return {labels["job"]: int(value) for labels, value in self.query("sum by (job) (up)")}

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/{path}", timeout=10) as answer:
            return json.load(answer)["data"]


def legend(template: str, labels: Mapping[str, str]) -> str:
    for name, value in labels.items():
        template = template.replace(f"{{{{{name}}}}}", value)
    return template
