"""The `baton trace` command: records the timelines of running services into a file for Perfetto's viewer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.output import print_json, reported_errors, text_console
from baton.client import Tls
from baton.errors import InvalidArgument
from baton.timeline import ServiceTimeline, record_timelines
from baton.trace_file import write_trace

VIEWER = "ui.perfetto.dev"


def trace(
    addresses: options.ServiceAddresses,
    seconds: Annotated[float, typer.Option(help="How long to record: up to 60.")] = 5.0,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("pair.json.gz"),
    max_events: Annotated[
        int | None, typer.Option(min=1, max=1 << 18, help="Of each track; the newest are kept.")
    ] = None,
    tls: Tls | None = None,
    token_file: options.TokenFile = None,
    as_json: options.Json = False,
) -> None:
    """Record for a while what services do, in a file that Perfetto's viewer opens."""
    addresses = options.all_of(addresses)
    token = options.read_token(token_file)
    with reported_errors(as_json):
        if not output.parent.is_dir():  # checked first, so that no recording is lost
            raise _unwritable(output, "there is no such directory")
        timelines = record_timelines(addresses, duration_s=seconds, max_events=max_events, tls=tls, token=token)
        try:
            num_events = write_trace(output, timelines)
        except OSError as error:
            raise _unwritable(output, error.strerror) from None
    if as_json:
        dropped = {each.address: each.num_dropped for each in timelines}
        print_json("trace", output=output, seconds=seconds, num_events=num_events, num_dropped=dropped)
    else:
        _report(output, num_events, timelines)


def _unwritable(output: Path, why: object) -> InvalidArgument:
    return InvalidArgument(f"output: {output}: {why}", reason="INVALID_FIELD", metadata={"field": "output"})


def _report(output: Path, num_events: int, timelines: list[ServiceTimeline]) -> None:
    console = text_console()
    console.print(f"{output}: {num_events} events; open it at {VIEWER}", markup=False)
    for each in timelines:
        for track, num_dropped in each.num_dropped.items():
            if num_dropped:
                console.print(f"{each.address}: track {track} had no room for {num_dropped} older events", markup=False)
