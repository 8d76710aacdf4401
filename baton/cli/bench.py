"""The `baton bench` command: measures the speed of a pair at several concurrencies."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from baton.cli import options
from baton.cli.output import print_json, reported_errors, text_console
from baton.cli.prepare_model import prepare_pair
from baton.client import AsyncClient, Tls
from baton.load_generator import LoadReport, Workload, run_workload, summarize
from baton.local_pair import LocalPair

_LOAD = "Load"


def bench(
    addresses: Annotated[
        list[str] | None,
        typer.Option("--address", "-a", help="A running decode service; repeatable. Without one a pair is started."),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Requests at a time, one row each.", rich_help_panel=_LOAD)
    ] = "1,8,32",
    num_requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Per row; as many as run at a time.", rich_help_panel=_LOAD)
    ] = None,
    num_prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, rich_help_panel=_LOAD)] = 128,
    num_new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, rich_help_panel=_LOAD)] = 128,
    model: options.Model = "demo",
    draft: options.Draft = None,
    num_prefill: options.NumPrefill = 1,
    num_decode: options.NumDecode = 1,
    device: options.Device = None,
    dtype: options.Dtype = None,
    prefill_args: options.PrefillArgs = None,
    decode_args: options.DecodeArgs = None,
    tls: Tls | None = None,
    token_file: options.TokenFile = None,
    as_json: options.Json = False,
) -> None:
    """Measure time to first token, time between tokens, tokens per second and the handoff, as a client sees them."""
    levels = options.parse_token_ids(concurrency, "--concurrency")
    if not levels or min(levels) < 1:
        raise typer.BadParameter(f"{concurrency[:64]!r} is not numbers from 1 on", param_hint="--concurrency")
    workloads = [
        Workload(
            concurrency=level,
            num_requests=num_requests or level,
            num_prompt_tokens=num_prompt_tokens,
            num_new_tokens=num_new_tokens,
            prompt_seed=index,
        )
        for index, level in enumerate(levels)
    ]
    token = options.read_token(token_file)
    with reported_errors(as_json), ExitStack() as stack:
        if not addresses:
            pair = LocalPair(
                model=model,
                draft=draft,
                num_prefill=num_prefill,
                num_decode=num_decode,
                device=device,
                dtype=dtype,
                prefill_args=prefill_args or (),
                decode_args=decode_args or (),
            )
            prepare_pair(pair, as_json=as_json)
            if not as_json:
                text_console().print(f"starting {', '.join(process.name for process in pair.processes)}", style="dim")
            addresses = list(stack.enter_context(pair).decode_addresses)
        reports = asyncio.run(_measure(addresses, tls, token, workloads, as_json))
    if not as_json:
        Console(highlight=False).print(_table(reports))
    if any(report.num_failed for report in reports):
        raise typer.Exit(1)


async def _measure(
    addresses: list[str], tls: Tls | None, token: str | None, workloads: list[Workload], as_json: bool
) -> list[LoadReport]:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(address, tls=tls, token=token)) for address in addresses]
        with options.naming(addresses[0]):
            vocab_size = (await clients[0].model_info()).vocab_size
        warm_up = Workload(
            concurrency=len(clients), num_requests=len(clients), num_prompt_tokens=8, num_new_tokens=8, prompt_seed=-1
        )
        await run_workload(clients, warm_up, vocab_size=vocab_size)
        reports = []
        for workload in workloads:
            if not as_json:
                text_console().print(f"{workload.num_requests} requests, {workload.concurrency} at a time")
            report = summarize(workload, await run_workload(clients, workload, vocab_size=vocab_size))
            reports.append(report)
            if as_json:
                print_json("report", workload=workload, report=report)
    return reports


def _table(reports: list[LoadReport]) -> Table:
    table = Table(
        "at a\ntime",
        "failed",
        "TTFT",
        "between\ntokens",
        "tokens\n/s",
        "decode\ntokens/s",
        "handoff\nMB/s",
        "exposed\ntransfer",
        box=None,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        caption="TTFT, between tokens and exposed transfer in milliseconds: p50 / p99",
    )
    for report in reports:
        table.add_row(
            str(report.concurrency),
            str(report.num_failed),
            _milliseconds(report.ttft_p50_s, report.ttft_p99_s),
            _milliseconds(report.inter_token_p50_s, report.inter_token_p99_s),
            _short(report.tokens_per_s),
            _short(report.decode_tokens_per_s),
            _short(report.handoff_mb_per_s),
            _milliseconds(report.exposed_transfer_p50_s, report.exposed_transfer_p99_s),
        )
    return table


def _milliseconds(p50_s: float, p99_s: float) -> str:
    return " / ".join(_short(seconds * 1e3) for seconds in (p50_s, p99_s))


def _short(value: float) -> str:
    """Formats `value` without decimals from 100 on, with one below, so that a table row fits 80 columns."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
