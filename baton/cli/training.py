"""The commands that train a draft head: `baton self-chat`, by which a served model makes training data with itself, and
`baton train-draft`.
"""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.cli import options
from baton.cli.output import reported_errors, text_console
from baton.cli.prepare_model import shown_progress
from baton.client import AsyncClient, Tls
from training.config import TrainConfig

if TYPE_CHECKING:
    from common.text.tokenizer import TextTokenizer

_DEFAULTS = TrainConfig()
_HEAD = "Head"
_LENGTH = "Length"
_RATES = "Rates"


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
    with reported_errors(False), options.naming(address):
        from common.checkpoints.source import resolve_model
        from common.text.tokenizer import TextTokenizer
        from training.generate import read_openings, read_questions

        source = read_openings(openings) if openings else read_questions(questions) if questions else None
        with shown_progress(False) as progress:
            directory = resolve_model(model, progress, dtype="bfloat16")
        asyncio.run(
            _write(
                address,
                tls,
                token,
                TextTokenizer.from_directory(directory),
                out,
                num_conversations=num_conversations,
                concurrency=concurrency,
                seed=seed,
                max_answer_tokens=max_answer_tokens,
                temperatures=answer_temperatures,
                source=source,
            )
        )


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
        raise typer.BadParameter(
            f"{text[:64]!r} is not numbers from 0 on with commas between them", param_hint="--temperatures"
        )
    return parsed


def train_draft(
    data: Annotated[
        list[Path], typer.Argument(help="Conversations: .npz files, put end to end in this order (docs/training.md).")
    ],
    out: Annotated[Path, typer.Option(help="Directory of the run: head, curve, checkpoints. A run in it goes on.")],
    model: options.Model = "demo",
    features: Annotated[
        Path | None, typer.Option(help="Directory of the target's states; computed when empty. OUT/features.")
    ] = None,
    start_from: Annotated[
        Path | None, typer.Option(help="A head to begin with; its draft vocabulary stays.", rich_help_panel=_HEAD)
    ] = None,
    revise_vocab: Annotated[
        bool, typer.Option(help="With start-from: take the draft vocabulary from the data.", rich_help_panel=_HEAD)
    ] = False,
    layers: Annotated[
        str | None,
        typer.Option(help="Layers whose entering streams the head reads; 2, n/2, n-3.", rich_help_panel=_HEAD),
    ] = None,
    draft_vocab: Annotated[
        int, typer.Option(help="Most frequent answer tokens.", rich_help_panel=_HEAD)
    ] = _DEFAULTS.draft_vocab,
    ttt_steps: Annotated[
        int, typer.Option(help="Steps of the training-time test.", rich_help_panel=_HEAD)
    ] = _DEFAULTS.ttt_steps,
    max_tokens: Annotated[
        int, typer.Option(help="Answer tokens to train on.", rich_help_panel=_LENGTH)
    ] = _DEFAULTS.max_tokens,
    warmup_tokens: Annotated[int, typer.Option(rich_help_panel=_LENGTH)] = _DEFAULTS.warmup_tokens,
    decay_fraction: Annotated[
        float, typer.Option(help="Of max-tokens, over which rates decay.", rich_help_panel=_LENGTH)
    ] = _DEFAULTS.decay_fraction,
    eval_tokens: Annotated[
        int, typer.Option(help="Between evaluations.", rich_help_panel=_LENGTH)
    ] = _DEFAULTS.eval_tokens,
    num_held_out: Annotated[
        int, typer.Option("--held-out", help="Conversations of each file to evaluate on.", rich_help_panel=_LENGTH)
    ] = _DEFAULTS.num_held_out,
    checkpoint_minutes: Annotated[
        float, typer.Option(help="Between checkpoints.", rich_help_panel=_LENGTH)
    ] = _DEFAULTS.checkpoint_minutes,
    muon_lr: Annotated[
        float, typer.Option(help="Of the layer's matrices.", rich_help_panel=_RATES)
    ] = _DEFAULTS.muon_lr,
    lr: Annotated[float, typer.Option(help="Of norms and output layer.", rich_help_panel=_RATES)] = _DEFAULTS.lr,
    batch_tokens: Annotated[
        int, typer.Option(help="Of a step, padding included.", rich_help_panel=_RATES)
    ] = _DEFAULTS.batch_tokens,
    seed: Annotated[int, typer.Option(min=0)] = _DEFAULTS.seed,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = _DEFAULTS.device,
    dtype: Annotated[str, typer.Option(help="Of the computation: bfloat16 or float32.")] = _DEFAULTS.dtype,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; all cores.")] = None,
) -> None:
    """Train an EAGLE-3 head on the target's own conversations. Ctrl-C stops; the same command continues."""
    captured = options.parse_token_ids(layers, "--layers")
    with reported_errors(False):
        _train(
            model=model,
            data=data,
            out=out,
            features=features,
            start_from=start_from,
            revises_vocab=revise_vocab,
            threads=threads,
            layers=None if captured is None else tuple(captured),
            draft_vocab=draft_vocab,
            ttt_steps=ttt_steps,
            max_tokens=max_tokens,
            warmup_tokens=warmup_tokens,
            decay_fraction=decay_fraction,
            eval_tokens=eval_tokens,
            num_held_out=num_held_out,
            checkpoint_minutes=checkpoint_minutes,
            muon_lr=muon_lr,
            lr=lr,
            batch_tokens=batch_tokens,
            seed=seed,
            device=device,
            dtype=dtype,
        )


def _train(
    *,
    model: str,
    data: list[Path],
    out: Path,
    features: Path | None,
    start_from: Path | None,
    revises_vocab: bool,
    threads: int | None,
    **settings: Any,
) -> None:
    from common.host.cores import spin_briefly

    spin_briefly()
    import torch

    from common.checkpoints.source import resolve_model
    from training.progress import ConsoleProgress
    from training.run import prepare_training

    config = TrainConfig(**settings)
    if threads is not None:
        torch.set_num_threads(threads)
    with shown_progress(False) as progress:
        directory = resolve_model(model, progress, dtype="bfloat16")
    trainer = prepare_training(
        directory,
        data,
        out,
        config=config,
        progress=ConsoleProgress(text_console()),
        features_dir=features,
        start_from=start_from,
        revises_vocab=revises_vocab,
    )
    with _interrupts() as interrupted:
        trainer.run(lambda: bool(interrupted))


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yields a list to which the first SIGINT or SIGTERM is added. The second one raises KeyboardInterrupt."""
    received: list[int] = []

    def receive(number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    previous = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
