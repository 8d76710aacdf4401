"""The entry point of the `baton` command."""

from __future__ import annotations

import signal

import typer

from baton.cli.bench import bench
from baton.cli.chat import chat
from baton.cli.demo import demo
from baton.cli.generate import generate
from baton.cli.health import health
from baton.cli.info import info
from baton.cli.self_chat import self_chat
from baton.cli.trace import trace
from baton.cli.train_draft import train_draft
from baton.cli.up import up

app = typer.Typer(
    name="baton",
    help="Run a prefill/decode pair, and talk to it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (up, demo, generate, chat, info, health, bench, trace, self_chat, train_draft):
    app.command()(command)


def main() -> None:
    """SIGTERM ends a command as Ctrl-C does, so that what it started is stopped."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()
