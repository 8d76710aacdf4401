"""The entry point of the `baton` command."""

from __future__ import annotations

import errno
import os
import signal
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from baton.cli.bench import bench
from baton.cli.chat import chat, generate
from baton.cli.demo import demo
from baton.cli.options import with_flags
from baton.cli.services import health, info, plan, role, trace
from baton.cli.training import self_chat, train_draft
from baton.cli.up import up

_DISTRIBUTION = "baton-serve"

app = typer.Typer(
    name="baton",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (up, demo, generate, chat, info, health, role, plan, bench, trace, self_chat, train_draft):
    app.command()(with_flags(command))


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"baton {version(_DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and end."),
    ] = False,
) -> None:
    """Run a prefill/decode pair, and talk to it."""


def main() -> None:
    """Runs the `baton` command. SIGTERM ends it like Ctrl-C, so that it stops the processes it started. A full disk is
    told in a line.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:  # as under a supervisor that closes it
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        if error.filename is None and sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would write the rest at its end
        sys.exit(f"{error.filename or 'the output'}: {error.strerror}")


if __name__ == "__main__":
    main()
