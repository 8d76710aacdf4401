"""`baton up`: a pair on this machine."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from baton.cli import options
from baton.cli.load_table import LoadReader, load_table
from baton.cli.output import print_json, reported_errors, text_console
from baton.cli.prepare_model import prepare_model
from baton.errors import BatonError
from baton.gateway_process import GatewayProcess, checked_listen
from baton.local_pair import LocalPair, Phase
from baton.service_process import ServiceProcess

_TUNING = "Tuning"


def up(
    model: options.Model = "demo",
    draft: options.Draft = None,
    num_prefill: options.NumPrefill = 1,
    num_decode: options.NumDecode = 1,
    device: options.Device = None,
    dtype: options.Dtype = None,
    chunk_tokens: Annotated[int | None, typer.Option(rich_help_panel=_TUNING)] = None,
    max_rows: Annotated[int | None, typer.Option(rich_help_panel=_TUNING)] = None,
    max_kv_tokens: Annotated[int | None, typer.Option(rich_help_panel=_TUNING)] = None,
    num_threads: Annotated[int | None, typer.Option(rich_help_panel=_TUNING)] = None,
    overlap: Annotated[bool | None, typer.Option("--overlap/--no-overlap", rich_help_panel=_TUNING)] = None,
    prefill_args: options.PrefillArgs = None,
    decode_args: options.DecodeArgs = None,
    prefill_config: Annotated[Path | None, typer.Option(help="YAML file for prefill services.")] = None,
    decode_config: Annotated[Path | None, typer.Option(help="YAML file for decode services.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Keep the services' logs here.")] = None,
    start_timeout_s: Annotated[float, typer.Option(min=0.0)] = 300.0,
    stop_timeout_s: Annotated[float, typer.Option(min=0.0, help="Time to drain, for each kind of service.")] = 40.0,
    with_gateway: Annotated[bool, typer.Option("--gateway", help="Start the OpenAI-compatible gateway too.")] = False,
    gateway_listen: Annotated[
        str, typer.Option(help="HOST:PORT of the gateway; port 0 is a free one.")
    ] = "127.0.0.1:8000",
    refresh_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at the load.")] = 1.0,
    as_json: options.Json = False,
) -> None:
    """Start prefill and decode services here, and keep them until Ctrl-C."""
    shared = _flags(max_rows=max_rows, max_kv_tokens=max_kv_tokens, num_threads=num_threads)
    overlap_flag = [] if overlap is None else ["--overlap" if overlap else "--no-overlap"]
    console = text_console()

    def on_phase(service: ServiceProcess, phase: Phase) -> None:
        if as_json:
            print_json("phase", name=service.name, address=service.address, pid=service.pid, phase=phase)
        else:
            console.print(f"{service.name} ({service.address}) is {phase.value}")

    with reported_errors(as_json):
        listen = checked_listen(gateway_listen) if with_gateway else ""
        prepare_model(model, as_json=as_json)
        pair = LocalPair(
            model=model,
            draft=draft,
            num_prefill=num_prefill,
            num_decode=num_decode,
            device=device,
            dtype=dtype,
            prefill_args=[*shared, *_flags(chunk_tokens=chunk_tokens), *(prefill_args or ())],
            decode_args=[*shared, *overlap_flag, *(decode_args or ())],
            prefill_config=prefill_config,
            decode_config=decode_config,
            log_dir=log_dir,
            exposes_metrics=with_gateway,
            start_timeout_s=start_timeout_s,
            stop_timeout_s=stop_timeout_s,
            on_phase=on_phase,
        )
        try:
            with ExitStack() as stack:
                stack.enter_context(pair)
                gateway = None
                if with_gateway:
                    gateway = stack.enter_context(
                        GatewayProcess(
                            listen=listen,
                            decode=pair.decode_addresses,
                            metrics=pair.metrics_addresses,
                            log_dir=pair.log_dir,
                            start_timeout_s=start_timeout_s,
                            stop_timeout_s=stop_timeout_s,
                        )
                    )
                loads = stack.enter_context(LoadReader(pair))
                if as_json:
                    _follow_as_json(pair, gateway, loads, refresh_s)
                else:
                    _follow(pair, gateway, loads, refresh_s)
        except KeyboardInterrupt:
            pass  # how `up` is meant to end; the pair has been stopped
    if as_json:
        print_json("stopped")
    else:
        console.print("stopped")


def _follow(pair: LocalPair, gateway: GatewayProcess | None, loads: LoadReader, refresh_s: float) -> None:
    console = text_console()
    console.print(f"logs: {pair.log_dir}", style="dim")
    console.print(f"ready: baton generate --chat --address {pair.decode_addresses[0]} 'Hello'   (Ctrl-C stops)")
    if gateway is not None:
        console.print(f"gateway: {gateway.url}/v1, its status page: {gateway.url}/")
    addresses = {service.name: service.address for service in pair.services}
    idle = threading.Event()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            _check(pair, gateway)
            live.update(load_table(addresses, loads.read()), refresh=console.is_terminal)
            idle.wait(refresh_s)


def _follow_as_json(pair: LocalPair, gateway: GatewayProcess | None, loads: LoadReader, refresh_s: float) -> None:
    services = [
        {"name": each.name, "role": each.role, "address": each.address, "pid": each.pid, "log": each.log_file}
        for each in pair.services
    ]
    if gateway is not None:
        process = gateway.process
        entry = {"name": process.name, "role": "gateway", "address": process.address, "pid": process.pid}
        services.append({**entry, "log": process.log_file})
    url = None if gateway is None else gateway.url
    print_json("ready", prefill=pair.prefill_addresses, decode=pair.decode_addresses, gateway=url, services=services)
    idle = threading.Event()
    while True:
        _check(pair, gateway)
        for name, load in loads.read().items():
            if isinstance(load, BatonError):
                print_json("load", name=name, error=str(load))
            else:
                print_json("load", name=name, load=load)
        idle.wait(refresh_s)


def _check(pair: LocalPair, gateway: GatewayProcess | None) -> None:
    """Raises ServiceDied when a process has ended."""
    pair.check()
    if gateway is not None:
        gateway.check()


def _flags(**values: object) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]
