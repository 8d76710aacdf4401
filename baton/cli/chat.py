"""The `baton chat` command: a conversation with the model, streamed."""

from __future__ import annotations

import re
import select
import signal
import socket
import sys
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.output import print_error, reported_errors, text_console
from baton.cli.stream import show
from baton.client import Tls
from baton.errors import BatonError
from baton.requests import SamplingOptions
from common.text.chat_messages import ChatMessage

_COMMAND = re.compile(r"/\w+")
_HELP = """/help    this list
/reset   forget the conversation
/exit    end, as Ctrl-D does
Ctrl-C   stop the answer; without one, end"""


def chat(
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    address: options.Address = None,
    tls: Tls | None = None,
    token_file: options.TokenFile = None,
    as_json: options.Json = False,
    *,
    sampling: SamplingOptions,
) -> None:
    """Talk with the model. One line is one message; /help lists the commands, Ctrl-C stops an answer."""
    first = [] if system is None else [ChatMessage("system", system)]
    messages = list(first)
    console = text_console()
    token = options.read_token(token_file)
    with reported_errors(as_json), options.decode_client(address, tls, token) as client:
        model = client.model_info().model  # asked even where it is not shown, so that a dead address is told at once
        if sys.stdin.isatty():
            console.print(f"{model} at {client.address}; /help lists the commands", style="dim", markup=False)
        while (line := _read_line()) is not None and line != "/exit":
            if line == "/reset":
                messages = list(first)
                console.print("(forgotten; a new conversation begins)", style="dim")
                continue
            if _COMMAND.fullmatch(line):
                console.print(_HELP if line == "/help" else f"there is no command {line}\n{_HELP}", style="dim")
                continue
            if not line:
                continue
            asked = [*messages, ChatMessage("user", line)]
            events = client.generate(
                chat=asked,
                **sampling,
            )
            try:
                shown = show(events, as_json=as_json)
            except KeyboardInterrupt:
                console.print("(stopped; this turn is forgotten)", style="dim")
                continue
            except BatonError as error:
                if not sys.stdin.isatty():
                    raise
                print_error(error)
                console.print("(this turn is forgotten; /reset begins a new conversation)", style="dim")
                continue
            messages = [*asked, ChatMessage("assistant", shown.completion.text)]


def _read_line() -> str | None:
    """Reads one line from the terminal. Returns None at the end of the input and after an interrupt."""
    is_asked = sys.stdin.isatty()
    try:
        if is_asked:
            text_console().print("you> ", end="", style="bold")
            _wait_for_input()
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        line = ""
    if is_asked and not line:
        print(file=sys.stderr)  # so that the shell's prompt gets a line of its own
    return line.strip() if line else None


def _wait_for_input() -> None:
    """Waits until the terminal has a line. Raises KeyboardInterrupt after Ctrl-C, also if it came just before the wait
    began: a read would not notice that, and wait for ever.
    """
    woken, waker = socket.socketpair()
    with woken, waker:
        waker.setblocking(False)
        before = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        try:
            select.select([sys.stdin, woken], [], [])
        finally:
            signal.set_wakeup_fd(before)
