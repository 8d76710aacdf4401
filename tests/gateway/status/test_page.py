"""Tests of the status page over HTTP. docs/status.md tells how to check it by hand in a browser."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
from collections.abc import AsyncIterator

import httpx2
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from gateway.request_record import GatewayMetrics
from gateway.status.collector import StatusCollector, status_routes
from gateway.status.snapshot import Gateway, ReplicaFigures, ServiceFigures, Snapshot
from tests.gateway.status.scene import Decode, ExposedDecode, numeric

GATEWAY = Gateway("1.2.3", ("demo", "other"), {"429": 3})


@pytest.fixture
async def viewer() -> AsyncIterator[httpx2.AsyncClient]:
    with ExposedDecode() as decode:
        collector = StatusCollector(
            metrics_targets=[decode.address],
            decode_targets=["10.0.0.1:50051"],
            open_client=lambda address: Decode(),
            look_up=numeric,
            first_round_s=60.0,
        )
        transport = httpx2.ASGITransport(app=Starlette(routes=status_routes(collector, lambda: GATEWAY)))
        async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
            yield client
        await collector.close()


def inline(kind: str, page: str) -> str:
    (text,) = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
    return str(text)


def inline_function(name: str, script: str) -> str:
    (text,) = re.findall(rf"^function {name}\(.*?^}}$", script, re.DOTALL | re.MULTILINE)
    return str(text)


async def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else(viewer: httpx2.AsyncClient) -> None:
    answer = await viewer.get("/")

    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        digest = hashlib.sha256(inline(kind, answer.text).encode()).digest()
        assert policy[f"{kind}-src"] == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert policy["frame-ancestors"] == "'none'"
    assert answer.headers["cache-control"] == "no-store"


async def test_the_page_is_whole_by_itself(viewer: httpx2.AsyncClient) -> None:
    page = (await viewer.get("/")).text

    assert set(re.findall(r"https?://[^\s\"'`]+", page)) == {"http://www.w3.org/2000/svg"}
    assert re.findall(r"<[^>]+\s(?:on\w+|style)=", page) == []
    assert "innerHTML" not in page and "insertAdjacentHTML" not in page and "document.write" not in page


async def test_every_element_that_the_script_asks_for_is_there(viewer: httpx2.AsyncClient) -> None:
    page = (await viewer.get("/")).text
    asked = set(re.findall(r'byId\("([\w-]+)"\)', inline("script", page)))

    assert asked
    assert asked <= set(re.findall(r'\sid="([\w-]+)"', page))
    assert set(re.findall(r'aria-labelledby="([\w-]+)"', page)) <= set(re.findall(r'\sid="([\w-]+)"', page))


async def test_every_field_that_the_script_reads_is_in_the_figures(viewer: httpx2.AsyncClient) -> None:
    figures = (await viewer.get("/status.json")).json()
    assert (figures["age_s"] is not None, figures["awaited"]) == (True, []), "the first answer has a round"
    assert [service["is_ready"] for service in figures["services"]] == [True]
    assert set(figures) == {"gateway", *(field.name for field in dataclasses.fields(Snapshot))}
    assert figures["gateway"] == {"version": "1.2.3", "model_names": ["demo", "other"], "errors": {"429": 3}}

    script = inline("script", (await viewer.get("/")).text)
    assert set(re.findall(r"\bpair\.(\w+)", script)) <= set(figures["pair"])
    assert {"decode_cached_share", "prefill_cached_share"} <= set(re.findall(r"\bpair\.(\w+)", script))
    of_service = set(re.findall(r"\bfigures\.(\w+)", inline_function("serviceCard", script)))
    assert {"cached_share", "evicted_tokens_per_s"} <= of_service
    assert of_service <= {field.name for field in dataclasses.fields(ServiceFigures)}
    assert set(re.findall(r"\bshown\.(\w+)", script)) <= set(figures)
    assert set(re.findall(r"\bgateway\.(\w+)", script)) == set(figures["gateway"])
    assert re.search(r"waitS = shown === null \|\| shown.age_s === null \? ", script), (
        "hurried until the first round only"
    )
    phases = set(re.findall(r'^  \["(\w+)", "', script, re.MULTILINE))
    assert phases == set(figures["pair"]["phases"])
    assert re.search(r'\["[^"]+", drafts \? rate\(drafts\.accept_length\)', inline_function("showTiles", script)), (
        "the figure that is known while requests run comes first"
    )
    assert {"address", "grpc_address", "target"} <= set(re.findall(r"\bservice\.(\w+)", script))
    assert set(re.findall(r"\breplica\.(\w+)", script)) == {field.name for field in dataclasses.fields(ReplicaFigures)}


async def test_every_status_that_is_counted_as_an_error_has_a_meaning(viewer: httpx2.AsyncClient) -> None:
    GatewayMetrics(registry := CollectorRegistry())
    samples = [sample for metric in registry.collect() for sample in metric.samples]
    counted = {sample.labels["status"] for sample in samples if sample.name == "baton_gateway_requests_total"}

    (meanings,) = re.findall(r"const MEANINGS = {(.*?)};", inline("script", (await viewer.get("/")).text), re.DOTALL)
    assert set(re.findall(r'(\d{3}): "[^"]+"', meanings)) == counted - {"200"}


async def test_no_table_is_wider_than_a_narrow_screen(viewer: httpx2.AsyncClient) -> None:
    """Addresses cannot be broken well: a table with a column of them is stacked there, each cell with its column."""
    page = (await viewer.get("/")).text
    tables = re.findall(r"<table(.*?)</table>", page, re.DOTALL)
    assert [table for table in tables if table.count("<th ") > 4] == [table for table in tables if "stacked" in table]
    assert "dataset.column" in inline_function("showLinks", inline("script", page))
    narrow = inline("style", page).partition("@media (max-width")[2]
    assert ".stacked [data-column]::before { content: attr(data-column)" in narrow
