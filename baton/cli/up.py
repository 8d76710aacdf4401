"""The `baton up` command: runs a prefill/decode pair on this machine."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from baton.cli import options
from baton.cli.output import print_json, reported_errors, text_console
from baton.cli.prepare_model import prepare_pair
from baton.cli.services import LoadReader, ServiceLoad, load_table
from baton.errors import BatonError, ServiceDied
from baton.local_pair import LocalPair, ProcessPhase
from baton.running_pairs import announced, choosing_ports, running_pairs
from baton.service_process import Ended, Restarts, ServiceProcess, StartedAgain

_TUNING = "Tuning"
_DECODE_PORT = 50051
_GATEWAY_LISTEN = "127.0.0.1:8000"
_PHASES = {
    ProcessPhase.STARTING: "does not answer",
    ProcessPhase.ALIVE: "is up, not ready",
    ProcessPhase.READY: "is ready",
}


def up(
    model: options.Model = "demo",
    draft: options.Draft = None,
    num_prefill: options.NumPrefill = 1,
    num_decode: options.NumDecode = 1,
    device: options.Device = None,
    dtype: options.Dtype = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one prompt in a prefill forward.", rich_help_panel=_TUNING)
    ] = None,
    max_rows: Annotated[
        int | None,
        typer.Option(help="Requests that each service serves at a time; by memory.", rich_help_panel=_TUNING),
    ] = None,
    max_kv_tokens: Annotated[
        int | None, typer.Option(help="Tokens whose KV each service holds; by memory.", rich_help_panel=_TUNING)
    ] = None,
    num_threads: Annotated[
        int | None, typer.Option(help="CPU threads of a forward; by cores.", rich_help_panel=_TUNING)
    ] = None,
    prefill_args: options.PrefillArgs = None,
    decode_args: options.DecodeArgs = None,
    prefill_config: Annotated[Path | None, typer.Option(help="YAML file for prefill services.")] = None,
    decode_config: Annotated[Path | None, typer.Option(help="YAML file for decode services.")] = None,
    log_dir: Annotated[Path | None, typer.Option(help="Keep the services' logs here.")] = None,
    start_timeout_s: Annotated[float, typer.Option(min=0.0, help="Time to become ready.")] = 300.0,
    stop_timeout_s: Annotated[float, typer.Option(min=0.0, help="Time to drain, for each kind of service.")] = 40.0,
    restarts: Annotated[
        bool, typer.Option("--restart/--no-restart", help="Start a process again that ends while it serves.")
    ] = True,
    with_gateway: Annotated[bool, typer.Option("--gateway", help="Start the OpenAI-compatible gateway too.")] = False,
    gateway_listen: Annotated[
        str | None,
        typer.Option(help=f"HOST:PORT of the gateway, {_GATEWAY_LISTEN}; port 0 is a free one. Implies --gateway."),
    ] = None,
    refresh_s: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks at the load.")] = 1.0,
    as_json: options.Json = False,
) -> None:
    """Start prefill and decode services here, and keep them until Ctrl-C."""
    shared = _flags(max_rows=max_rows, max_kv_tokens=max_kv_tokens, num_threads=num_threads)
    told = _Reporter(as_json, keeps_logs=log_dir is not None)
    try:
        with reported_errors(as_json), ExitStack() as keeping:
            with choosing_ports() as taken_ports:
                pair = LocalPair(
                    model=model,
                    draft=draft,
                    num_prefill=num_prefill,
                    num_decode=num_decode,
                    device=device,
                    dtype=dtype,
                    prefill_args=[*shared, *_flags(chunk_tokens=chunk_tokens), *(prefill_args or ())],
                    decode_args=[*shared, *(decode_args or ())],
                    prefill_config=prefill_config,
                    decode_config=decode_config,
                    log_dir=log_dir,
                    decode_port=_DECODE_PORT,
                    taken_ports=taken_ports,
                    gateway_listen=gateway_listen or (_GATEWAY_LISTEN if with_gateway else None),
                    start_timeout_s=start_timeout_s,
                    stop_timeout_s=stop_timeout_s,
                    on_phase=told.phase,
                    on_words=told.words,
                )
                # The pair is announced before it is ready, so that other commands wait for it.
                keeping.enter_context(announced(pair.decode_addresses, pair.ports))
            prepare_pair(pair, as_json=as_json)
            told.starting(pair, is_found=",".join(pair.decode_addresses) in running_pairs())
            with pair, LoadReader(pair) as loads:
                try:
                    told.ready(pair)
                    _follow(pair, told, loads, restarts, refresh_s)
                except KeyboardInterrupt:
                    told.stopping(stop_timeout_s)
                    raise
    except KeyboardInterrupt:
        pass  # the intended end of `up`; the pair has been stopped
    told.stopped()


class _Reporter:
    """Reports events of the pair to the user: as text, or as JSON lines for programs."""

    def __init__(self, as_json: bool, *, keeps_logs: bool) -> None:
        self.as_json = as_json
        self._keeps_logs = keeps_logs
        self.console = text_console()

    def phase(self, process: ServiceProcess, phase: ProcessPhase, why: str) -> None:
        if self.as_json:
            print_json("phase", name=process.name, address=process.address, pid=process.pid, phase=phase, why=why)
        elif process.is_running:  # a process that has ended is reported elsewhere
            self._line(f"{process.name} ({process.address}) {_PHASES[phase]}{f': {why}' if why else ''}")

    def words(self, process: ServiceProcess, words: str) -> None:
        if self.as_json:
            print_json("said", name=process.name, words=words)
        else:
            self._line(f"{process.name} {words}")

    def happened(self, process: ServiceProcess, event: Ended | StartedAgain) -> None:
        match event:
            case Ended(error, wait_s) if self.as_json:
                status = {"returncode": error.returncode} if isinstance(error, ServiceDied) else {}
                print_json("ended", name=process.name, **status, message=str(error), restart_in_s=wait_s)
            case Ended(error, wait_s):
                self._line(f"{error}; it is started again in {wait_s:g} s")
            case StartedAgain(pid) if self.as_json:
                print_json("restarted", name=process.name, address=process.address, pid=pid)
            case StartedAgain(pid):
                self._line(f"{process.name} ({process.address}) is started again, as process {pid}")

    def starting(self, pair: LocalPair, *, is_found: bool) -> None:
        """`is_found` says whether other commands find this pair."""
        if not self.as_json:
            names = ", ".join(process.name for process in pair.processes)
            until = "" if self._keeps_logs else " (removed on Ctrl-C; --log-dir keeps them)"
            self._line(f"starting {names}; logs: {pair.log_dir}{until}")
            if not is_found:
                self._line(
                    "other commands do not find this pair, because XDG_RUNTIME_DIR cannot be written: give them "
                    f"--address {','.join(pair.decode_addresses)}"
                )

    def ready(self, pair: LocalPair) -> None:
        address, url = pair.decode_addresses[0], pair.gateway_url
        if self.as_json:
            services = [
                {"name": each.name, "role": each.role, "address": each.address, "pid": each.pid, "log": each.log_file}
                for each in pair.processes
            ]
            addresses = {"prefill": pair.prefill_addresses, "decode": pair.decode_addresses}
            print_json("ready", **addresses, gateway=url, metrics=pair.metrics_addresses, services=services)
            return
        self._line(f"ready: baton chat, or baton generate --chat --address {address} 'Hello'   (Ctrl-C stops)")
        if url is not None:
            self._line(f"gateway: {url}/v1, its status page: {url}/, its metrics: {url}/metrics")
        if pair.metrics_addresses:
            metrics = zip(pair.services, pair.metrics_addresses, strict=True)
            self._line("metrics: " + ", ".join(f"http://{address}/metrics ({each.name})" for each, address in metrics))

    def loads(self, loads: Mapping[str, ServiceLoad]) -> None:
        for name, load in loads.items():
            if isinstance(load, BatonError):
                print_json("load", name=name, error=str(load))
            else:
                print_json("load", name=name, load=load)

    def stopping(self, timeout_s: float) -> None:
        if self.as_json:
            print_json("stopping", timeout_s=timeout_s)
        else:
            self._line(
                f"stopping: requests that run may end first, for up to {timeout_s:g} s of each kind of service; "
                "Ctrl-C again stops at once"
            )

    def stopped(self) -> None:
        if self.as_json:
            print_json("stopped")
        else:
            self._line("stopped")

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False)


def _follow(pair: LocalPair, told: _Reporter, loads: LoadReader, restarts: bool, refresh_s: float) -> None:
    """Watches the pair until an interrupt. Raises ServiceDied when a process has ended and is not restarted."""
    addresses = {service.name: service.address for service in pair.services}
    restarting = {process: Restarts(process) for process in pair.processes} if restarts else {}
    idle = threading.Event()
    with ExitStack() as stack:
        watch = stack.enter_context(pair.watch())
        watch.phases.update(dict.fromkeys(pair.processes, ProcessPhase.READY))
        table = None
        if not told.as_json and told.console.is_terminal:
            table = stack.enter_context(Live(console=told.console, auto_refresh=False))
        while True:
            watch.read_logs()
            for process in pair.processes:
                watch.look_at(process)
                if not restarts:
                    process.check()
                elif event := restarting[process].look(is_ready=watch.phases[process] is ProcessPhase.READY):
                    told.happened(process, event)
            if told.as_json:
                told.loads(loads.read())
            elif table is not None:
                table.update(load_table(addresses, loads.read()), refresh=True)
            idle.wait(refresh_s)


def _flags(**values: object) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]
