"""The `baton self-chat` command: a served model talks with itself, to make training data for a draft head."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli import options
from baton.cli.output import reported_errors, text_console
from baton.cli.prepare_model import prepare_model
from baton.client import AsyncClient, Tls
from baton.errors import FailedPrecondition

if TYPE_CHECKING:
    from common.text.tokenizer import TextTokenizer


def self_chat(
    address: options.ServiceAddress,
    out: Annotated[Path, typer.Option(help="File to write; one that was begun is continued.")],
    num_conversations: Annotated[int, typer.Option("--conversations", min=1, help="In the file, in the end.")] = 1000,
    openings: Annotated[
        Path | None, typer.Option(help="Text: each question begins with one of its lines, the model continues it.")
    ] = None,
    questions: Annotated[
        Path | None, typer.Option(help='JSON lines: conversation i answers the "question" of line i.')
    ] = None,
    temperatures: Annotated[str, typer.Option(help="Of answers: one is drawn for each.")] = "0,0.5,0.8,1",
    max_answer_tokens: Annotated[int, typer.Option(min=2)] = 384,
    concurrency: Annotated[int, typer.Option(min=1, help="Conversations at a time.")] = 16,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    model: Annotated[str, typer.Option(help="The served model: its tokenizer is used here.")] = "demo",
    tls: Tls | None = None,
    token_file: options.TokenFile = None,
) -> None:
    """Let the served model ask itself questions and answer them, and write training data for `train-draft`."""
    if openings and questions:
        raise typer.BadParameter("give one of them", param_hint="--openings and --questions")
    answer_temperatures = _parse_temperatures(temperatures)
    token = options.read_token(token_file)
    with reported_errors(False):
        prepare_model(model, as_json=False)
        from common.checkpoints.source import resolve_model
        from common.errors import StartupError
        from common.text.tokenizer import TextTokenizer
        from training.generate import read_openings, read_questions

        try:
            source = read_openings(openings) if openings else read_questions(questions) if questions else None
            encoder = TextTokenizer.from_directory(resolve_model(model, dtype="bfloat16"))
            asyncio.run(
                _write(
                    address,
                    tls,
                    token,
                    encoder,
                    out,
                    num_conversations=num_conversations,
                    concurrency=concurrency,
                    seed=seed,
                    max_answer_tokens=max_answer_tokens,
                    temperatures=answer_temperatures,
                    source=source,
                )
            )
        except StartupError as error:
            raise FailedPrecondition(str(error), reason=error.reason) from error


async def _write(
    address: str,
    tls: Tls | None,
    token: str | None,
    encoder: TextTokenizer,
    out: Path,
    *,
    num_conversations: int,
    concurrency: int,
    **settings: Any,
) -> None:
    from training.generate import SelfChat, write_self_chat
    from training.progress import ConsoleProgress

    progress = ConsoleProgress(text_console())
    async with AsyncClient(address, tls=tls, token=token) as client:
        served = await client.model_info()
        self_chat = SelfChat(client, encoder, model_digest=served.digest, **settings)
        num_before = await write_self_chat(
            out,
            self_chat,
            num_conversations=num_conversations,
            vocab_size=served.vocab_size,
            concurrency=concurrency,
            progress=progress,
        )
    progress.line(f"{out}: {max(0, num_conversations - num_before)} conversations added to {num_before}")


def _parse_temperatures(text: str) -> tuple[float, ...]:
    try:
        parsed = tuple(float(value) for value in text.split(","))
    except ValueError:
        parsed = ()
    if not parsed or not all(0 <= value < math.inf for value in parsed):
        raise typer.BadParameter("give numbers from 0 on with commas between them", param_hint="--temperatures")
    return parsed
