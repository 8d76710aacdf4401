"""The `baton plan` command: says how many prefill and decode services the present load wants. It changes nothing."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.output import print_json, reported_errors, text_console
from baton.client import Tls
from baton.load_samples import sample_loads
from baton.planner import MIN_SAMPLES, Advice, Need, advise


def plan(
    addresses: options.ServiceAddresses,
    window_s: Annotated[
        float, typer.Option(min=1.0, max=3600.0, help="To watch; 8 times --interval-s at least.")
    ] = 60.0,
    interval_s: Annotated[float, typer.Option(min=0.05, max=60.0, help="Between two looks.")] = 0.5,
    tls: Tls | None = None,
    token_file: options.TokenFile = None,
    other_token_file: options.OtherTokenFile = None,
    as_json: options.Json = False,
) -> None:
    """Watch the load of running services, and say how many of each kind it wants. Name all services, of both kinds.

    Exit with 1 if none answers.
    """
    addresses = options.all_of(addresses)
    if window_s < MIN_SAMPLES * interval_s:
        raise typer.BadParameter(f"is less than {MIN_SAMPLES} times --interval-s", param_hint="--window-s")
    token, other_token = options.read_token(token_file), options.read_token(other_token_file)
    console = text_console()
    if not as_json:
        console.print(f"watching for {window_s:g} s: {', '.join(addresses)}", style="dim")
    with reported_errors(as_json), nullcontext() if as_json else console.status("watching"):
        seen = sample_loads(
            addresses, window_s=window_s, interval_s=interval_s, tls=tls, token=token, other_token=other_token
        )
        advice = advise(seen.prefill, seen.decode, missing=seen.missing)
    if as_json:
        print_json("plan", window_s=window_s, advice=advice)
    else:
        print(_text(advice))
    if not (seen.prefill or seen.decode):
        raise typer.Exit(1)


def _text(advice: Advice) -> str:
    lines = [_need_text("prefill", advice.prefill), _need_text("decode", advice.decode)]
    lines += [f"switch: baton role --address {address} {role}" for address, role in advice.switches.items()]
    if advice.holds:
        lines.append(f"no change is advised now: {advice.holds}")
    lines += [f"not known: {what}" for what in advice.missing]
    return "\n".join(lines)


def _need_text(kind: str, need: Need) -> str:
    wanted = "" if need.wanted is None else f", {need.wanted} wanted"
    return f"{kind}: {need.now} now{wanted}; busy {need.mean:.2f} on average, {need.peak:.2f} at the peak"
