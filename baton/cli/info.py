"""The `baton info` command: shows the model and the load of a running decode service."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from baton.cli import options
from baton.cli.load_table import pool_text
from baton.cli.output import print_json, reported_errors
from baton.client import Tls
from baton.server_info import InferenceLoad, ModelInfo


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
    if as_json:
        print_json("info", address=client.address, model=model, load=load)
    else:
        _print_table(client.address, model, load)


def _print_table(address: str, model: ModelInfo, load: InferenceLoad) -> None:
    table = Table(show_header=False, box=None)
    table.add_row("address", address)
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
    table.add_row("rows", pool_text(load.rows))
    table.add_row("slots", pool_text(load.slots))
    table.add_row("requests", f"{load.num_running} running, {load.num_queued} queued")
    for replica in load.prefill_replicas:
        state = "ready" if replica.is_ready else f"not ready: {replica.reason}"
        held = f"{replica.num_rows} rows, should have {replica.num_known_tokens} tokens cached"
        table.add_row("prefill", f"{replica.address} {state}, {held}")
    if load.is_degraded:
        table.add_row("degraded", "no prefill replica is ready: the decode service computes prompts itself")
    Console(highlight=False, markup=False).print(table)
