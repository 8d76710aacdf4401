"""The commands that talk to the model: `baton chat` is a conversation, `baton generate` the answer to one prompt."""

from __future__ import annotations

import re
import select
import signal
import socket
import sys
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.output import print_error, reported_errors, show, text_console
from baton.client import Tls
from baton.errors import BatonError
from baton.requests import SamplingOptions
from common.text.chat_messages import ChatMessage

_COMMAND = re.compile(r"/\w+")
_HELP = """/help    this list
/reset   forget the conversation
/exit    end, as Ctrl-D does
Ctrl-C   stop the answer; without one, end"""


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help='The prompt. "-", or a pipe and no prompt, reads standard input.')
    ] = None,
    token_ids: Annotated[str | None, typer.Option(help="The prompt as token ids: 1,2,3.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's chat message.")] = False,
    system: Annotated[str | None, typer.Option(help="System message; implies --chat.")] = None,
    generated_token_ids: Annotated[
        str | None, typer.Option(help="Output that an earlier stream delivered: go on after it.")
    ] = None,
    request_id: Annotated[str | None, typer.Option()] = None,
    priority: Annotated[int | None, typer.Option(help="Lower is served earlier; 0 if not given.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Deadline of the request.")] = None,
    address: options.Address = None,
    tls: Tls | None = None,
    token_file: options.TokenFile = None,
    as_json: options.Json = False,
    *,
    sampling: SamplingOptions,
) -> None:
    """Stream the answer to a prompt."""
    prompt_ids = options.parse_token_ids(token_ids, "--token-ids")
    text = prompt
    if prompt == "-" or (prompt is None and token_ids is None and not sys.stdin.isatty()):
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise typer.BadParameter(f"standard input is not UTF-8: {error}", param_hint="prompt") from None
    if token_ids is not None and (chat or system is not None):
        raise typer.BadParameter("makes a chat of a text, not of --token-ids", param_hint="--chat or --system")
    if token_ids is None and (text is None or (text == "" and prompt is None)):
        raise typer.BadParameter("give one, on standard input or as an argument, or --token-ids", param_hint="prompt")
    messages = None
    if (chat or system is not None) and text is not None:
        messages = [ChatMessage("user", text)]
        if system is not None:
            messages.insert(0, ChatMessage("system", system))
    token = options.read_token(token_file)
    with reported_errors(as_json), options.decode_client(address, tls, token) as client:
        events = client.generate(
            text if messages is None else None,
            chat=messages,
            token_ids=prompt_ids,
            generated_token_ids=options.parse_token_ids(generated_token_ids, "--generated-token-ids") or (),
            request_id=request_id,
            priority=priority,
            timeout_s=timeout_s,
            **sampling,
        )
        shown = show(events, as_json=as_json)
    if not as_json:
        text_console().print(shown.summary(), style="dim")


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
