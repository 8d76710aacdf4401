"""The commands that ask running services: `baton info`, `baton health`, `baton role`, `baton plan` and `baton trace`.

`LoadReader` asks all services of a pair, for `baton up`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Self

import typer
from rich.console import Console
from rich.table import Table

from baton.cli import options
from baton.cli.output import print_json, reported_errors, text_console
from baton.client import Client, PrefillClient, Tls
from baton.client.channel import single_server
from baton.errors import BatonError, invalid_field
from baton.local_pair import LocalPair
from baton.planner import MIN_SAMPLES, Advice, Need, advise, sample_loads
from baton.roles import START_TIMEOUT_S, RoleChange, RoleClient, RoleState
from baton.server_info import HealthStatus, InferenceLoad, ModelInfo, PrefillLoad
from baton.timeline import ServiceTimeline, record_timelines, write_trace
from common.role import Role
from common.telemetry.stats import PoolCounts

LOAD_TIMEOUT_S = 2.0
VIEWER = "ui.perfetto.dev"

ServiceLoad = InferenceLoad | PrefillLoad | BatonError


def info(
    address: options.Address = None,
    tls: Tls | None = None,
    token_file: options.TokenFile = None,
    as_json: options.Json = False,
) -> None:
    """Show which model is served, by which prefill replicas, and the load."""
    token = options.read_token(token_file)
    with reported_errors(as_json), options.decode_client(address, tls, token) as client:
        model, load = client.model_info(), client.load()
        failures = _failures([each.strip() for each in client.address.split(",")], tls, token)
    if as_json:
        print_json("info", address=client.address, model=model, load=load, failures=failures)
    else:
        _print_info(client.address, model, load, failures)


def _failures(addresses: Sequence[str], tls: Tls | None, token: str | None) -> dict[str, str]:
    """Asks each of several decode services. Returns by address why one does not answer; a call asks any that does."""

    def failure_of(address: str) -> str:
        with Client(address, tls=tls, token=token, rpc_timeout_s=LOAD_TIMEOUT_S) as client:
            try:
                client.load()
            except BatonError as error:
                return str(error)
        return ""

    if len(addresses) == 1:
        return {}
    with ThreadPoolExecutor(len(addresses)) as threads:
        return {
            each: failure
            for each, failure in zip(addresses, threads.map(failure_of, addresses), strict=True)
            if failure
        }


def _print_info(address: str, model: ModelInfo, load: InferenceLoad, failures: Mapping[str, str]) -> None:
    table = Table(show_header=False, box=None)
    table.add_row("address", address)
    for each, reason in failures.items():
        table.add_row("no answer", reason if each in reason else f"{each}: {reason}")
    table.add_row("model", f"{model.model} ({model.architecture})")
    table.add_row("runs on", f"{model.device}, {model.dtype}")
    table.add_row("context", f"{model.max_context_tokens} tokens, vocabulary {model.vocab_size}")
    table.add_row("end tokens", ", ".join(map(str, model.eos_token_ids)) or "none")
    table.add_row(
        "output format", f"{model.output_format or 'unknown'}{', with reasoning' if model.has_reasoning else ''}"
    )
    for group, num_bytes in model.layer_groups.items():
        table.add_row(f"KV ({group})", f"{num_bytes} bytes per token")
    if model.sampling_defaults:
        defaults = ", ".join(f"{name} {value:g}" for name, value in model.sampling_defaults.items())
        table.add_row("sampling", f"{defaults}, where a request gives no value")
    table.add_row("version", model.version)
    table.add_row("rows", _pool_text(load.rows))
    table.add_row("slots", _pool_text(load.slots))
    table.add_row("requests", f"{load.num_running} running, {load.num_queued} queued")
    for replica in load.prefill_replicas:
        state = "ready" if replica.is_ready else f"not ready: {replica.reason}"
        held = f"{replica.num_rows} rows, should have {replica.num_known_tokens} tokens cached"
        table.add_row("prefill", f"{replica.address} {state}, {held}")
    if load.is_degraded:
        table.add_row("degraded", "no prefill replica is ready: the decode service computes prompts itself")
    Console(highlight=False, markup=False).print(table)


def health(
    address: options.ServiceAddress,
    service: Annotated[
        str, typer.Option(help='"" asks whether it lives; baton.v1.Inference, baton.v1.Prefill whether it serves.')
    ] = "",
    timeout_s: Annotated[float, typer.Option(min=0.0)] = 5.0,
    tls: Tls | None = None,
    as_json: options.Json = False,
) -> None:
    """Exit with 0 when the service serves, else with 1."""
    with (
        reported_errors(as_json),
        options.naming(address),
        Client(address, tls=tls, rpc_timeout_s=timeout_s) as client,
    ):
        status = client.health(service)
    if as_json:
        print_json("health", address=address, service=service, status=status)
    else:
        print(status.value)
        if status is HealthStatus.UNKNOWN_SERVICE:
            text_console().print(
                f"{address} does not serve {service!r}: a decode service serves baton.v1.Inference, a prefill service "
                "baton.v1.Prefill",
                style="red",
                markup=False,
            )
    if status is not HealthStatus.SERVING:
        raise typer.Exit(1)


def role(
    address: options.ServiceAddress,
    wanted: Annotated[
        Role | None, typer.Argument(metavar="[prefill|decode]", help="What it is to be; none: only show.")
    ] = None,
    start_timeout_s: Annotated[
        float, typer.Option(min=0.0, help="How long to wait for it, after its grace period.")
    ] = START_TIMEOUT_S,
    tls: Tls | None = None,
    token_file: options.TokenFile = None,
    other_token_file: options.OtherTokenFile = None,
    as_json: options.Json = False,
) -> None:
    """Show whether a service is a prefill or a decode service, or make it the other."""
    token, other_token = options.read_token(token_file), options.read_token(other_token_file)
    with reported_errors(as_json), RoleClient(address, tls=tls, token=token, other_token=other_token) as client:
        if wanted is None:
            state = client.state()
            print_json("role", address=address, state=state) if as_json else print(_state_text(address, state))
        else:
            with _shown_wait(f"waiting until {address} is a {wanted} service", as_json):
                change = client.change(wanted, start_timeout_s=start_timeout_s)
            print_json("role_change", address=address, change=change) if as_json else print(
                _change_text(address, change)
            )


def _state_text(address: str, state: RoleState) -> str:
    doing = f", changing to {state.changing_to}" if state.changing_to else ""
    ready = "ready" if state.is_ready else "not ready"
    others = [each for each in state.roles if each is not state.role]
    can = f"can be a {others[0]} service" if others else "stays one: its setting other_role is not set"
    failed = f"; the last change failed: {state.last_failure}" if state.last_failure else ""
    return f"{address}: a {state.role} service, {ready}{doing}; {can}{failed}"


def _change_text(address: str, change: RoleChange) -> str:
    role = change.after.role
    if not change.seconds:
        return f"{address}: is a {role} service already"
    back = f"baton role --address {address} {change.before}"
    return f"{address}: {change.before} -> {role} in {change.seconds:.1f} s; back: {back}"


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
    waits = f"watching for {window_s:g} s: {', '.join(addresses)}"
    with reported_errors(as_json), _shown_wait(waits, as_json):
        seen = sample_loads(
            addresses, window_s=window_s, interval_s=interval_s, tls=tls, token=token, other_token=other_token
        )
        advice = advise(seen.prefill, seen.decode, missing=seen.missing)
    if as_json:
        print_json("plan", window_s=window_s, advice=advice)
    else:
        print(_advice_text(advice))
    if not (seen.prefill or seen.decode):
        raise typer.Exit(1)


def _advice_text(advice: Advice) -> str:
    lines = [_need_text("prefill", advice.prefill), _need_text("decode", advice.decode)]
    lines += [f"switch: baton role --address {address} {role}" for address, role in advice.switches.items()]
    if advice.holds:
        lines.append(f"no change is advised now: {advice.holds}")
    lines += [f"not known: {what}" for what in advice.missing]
    return "\n".join(lines)


def _need_text(kind: str, need: Need) -> str:
    wanted = "" if need.wanted is None else f", {need.wanted} wanted"
    return f"{kind}: {need.now} now{wanted}; busy {need.mean:.2f} on average, {need.peak:.2f} at the peak"


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
            raise invalid_field("output", f"{output}: there is no such directory")
        for address in addresses:
            single_server(address)
        with _shown_wait(f"recording for {seconds:g} s: {', '.join(addresses)}", as_json):
            timelines = record_timelines(addresses, duration_s=seconds, max_events=max_events, tls=tls, token=token)
        try:
            num_events = write_trace(output, timelines)
        except OSError as error:
            raise invalid_field("output", f"{output}: {error.strerror}") from None
    if as_json:
        dropped = {each.address: each.num_dropped for each in timelines}
        print_json("trace", output=output, seconds=seconds, num_events=num_events, num_dropped=dropped)
    else:
        _report(output, num_events, timelines)


def _report(output: Path, num_events: int, timelines: list[ServiceTimeline]) -> None:
    console = text_console()
    console.print(f"{output}: {num_events} events; open it at {VIEWER}", markup=False)
    for each in timelines:
        for track, num_dropped in each.num_dropped.items():
            if num_dropped:
                console.print(f"{each.address}: track {track} had no room for {num_dropped} older events", markup=False)


@contextmanager
def _shown_wait(what: str, as_json: bool) -> Iterator[None]:
    """Prints what a command waits for, before a wait that may be long, and shows on a terminal that it still waits."""
    if as_json:
        yield
        return
    console = text_console()
    console.print(what, style="dim", markup=False)
    with console.status(what.partition(" ")[0]):
        yield


class LoadReader:
    """Asks every service of a pair for its load. If a service does not answer, its error takes the
    place of its load.
    """

    def __init__(self, pair: LocalPair) -> None:
        self._stack = ExitStack()
        self._clients: dict[str, Client | PrefillClient] = {}
        for service in pair.services:
            client: Client | PrefillClient = (
                PrefillClient(service.address, rpc_timeout_s=LOAD_TIMEOUT_S)
                if service.role == "prefill"
                else Client(service.address, rpc_timeout_s=LOAD_TIMEOUT_S)
            )
            self._stack.callback(client.close)
            self._clients[service.name] = client

    def read(self) -> dict[str, ServiceLoad]:
        loads: dict[str, ServiceLoad] = {}
        for name, client in self._clients.items():
            try:
                loads[name] = client.load()
            except BatonError as error:
                loads[name] = error
        return loads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def load_table(addresses: Mapping[str, str], loads: Mapping[str, ServiceLoad]) -> Table:
    table = Table("service", "address", "requests", "rows", "KV slots", box=None)
    for name, address in addresses.items():
        match loads.get(name):
            case InferenceLoad() as load:
                requests = f"{load.num_running} running, {load.num_queued} queued"
            case PrefillLoad() as load:
                requests = f"{load.num_computing} computing, {load.num_queued} queued"
            case error:
                table.add_row(name, address, "" if error is None else str(error))
                continue
        table.add_row(name, address, requests, _pool_text(load.rows), _pool_text(load.slots))
    return table


def _pool_text(pool: PoolCounts) -> str:
    """Formats how many rows or slots of the pool are in each state. States that hold none are left out."""
    states = ("cached", "reserved", "transferring", "running", "quarantined")
    in_use = [f"{getattr(pool, state)} {state}" for state in states if getattr(pool, state)]
    return ", ".join([f"{pool.free} of {pool.total} free", *in_use])
