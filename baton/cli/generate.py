"""The `baton generate` command: streams the answer to one prompt."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.output import reported_errors, text_console
from baton.cli.stream import show
from baton.client import Tls
from baton.requests import SamplingOptions
from common.text.chat_messages import ChatMessage


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
        text = sys.stdin.read()
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
