"""`baton demo`: the whole path once, on a real model, checked against a committed answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean
from typing import Annotated

import typer
from rich.console import Console

from baton.cli import options
from baton.cli.demo_answer import QUESTION, TOKEN_IDS
from baton.cli.output import print_json, reported_errors, text_console
from baton.cli.prepare_model import DEMO_MODEL, prepare_model
from baton.cli.stream import Shown, measure, show
from baton.client import Client, EventStream
from baton.errors import Internal
from baton.events import tokens_per_forward
from baton.full_speed import are_fused, await_fused
from baton.local_pair import LocalPair
from baton.requests import ChatMessage

_FULL_SPEED_TIMEOUT_S = 60.0
_DTYPE = "float32"  # in it the greedy answer is the same on every machine
_OPTIONS = (f"--draft={DEMO_MODEL}", "--max-rows=4", "--max-kv-tokens=2048")  # short answers take little memory
_TURNS = (False, True, True, False)
"""With drafts or without, after the answer that is shown: a machine whose speed drifts favours neither."""


def demo(
    prefill_args: options.PrefillArgs = None,
    decode_args: options.DecodeArgs = None,
    start_timeout_s: Annotated[float, typer.Option(min=0.0)] = 120.0,
    as_json: options.Json = False,
) -> None:
    """Serve SmolLM2-135M and its draft head on two processes, stream an answer, print what it took."""
    console = text_console()
    with reported_errors(as_json):
        prepare_model(DEMO_MODEL, as_json=as_json)
        if not as_json:
            console.print("starting a prefill and a decode process", style="dim")
        pair = LocalPair(
            model=DEMO_MODEL,
            device="cpu",
            dtype=_DTYPE,
            prefill_args=[*_OPTIONS, *(prefill_args or ())],
            decode_args=[*_OPTIONS, *(decode_args or ())],
            start_timeout_s=start_timeout_s,
            exposes_metrics=True,
        )
        with pair, Client(pair.decode_addresses[0]) as client:
            if not as_json:
                pids = ", ".join(f"{each.name} (pid {each.pid}, {each.address})" for each in pair.services)
                console.print(pids, style="dim")
                console.print(f"\n> {QUESTION}\n", markup=False)
            shown = show(_ask(client, speculate=True), as_json=as_json)
            given = (prefill_args, decode_args)
            fusing = [
                address
                for address, arguments in zip(pair.metrics_addresses, given, strict=True)
                if "--no-fused-forward" not in (arguments or ())
            ]
            _await_full_speed(fusing, console, as_json)
            runs = [(speculates, measure(_ask(client, speculate=speculates))) for speculates in _TURNS]
        drafted = [run for speculates, run in runs if speculates]
        plain = [run for speculates, run in runs if not speculates]
        answers = [each.completion.token_ids for each in (shown, *drafted, *plain)]
        differing = next((answer for answer in answers if answer != TOKEN_IDS), None)
        _print_figures(shown, drafted, plain, differing is None, as_json)
        if differing is not None:
            raise Internal(_first_difference(differing), reason="DEMO_ANSWER_DIFFERS")


def _await_full_speed(metrics_addresses: Sequence[str], console: Console, as_json: bool) -> None:
    """Until the services' kernels are compiled, which the first start on a machine takes; not for ever."""
    with suppress(OSError):  # a service without metrics tells nothing to wait for
        if not are_fused(metrics_addresses):
            if not as_json:
                console.print("\ncompiling kernels, once on this machine", style="dim")
            await_fused(metrics_addresses, timeout_s=_FULL_SPEED_TIMEOUT_S)


def _ask(client: Client, *, speculate: bool) -> EventStream:
    return client.generate(
        chat=[ChatMessage("user", QUESTION)],
        temperature=0.0,
        max_tokens=len(TOKEN_IDS),
        timeout_s=120.0,
        speculate=speculate,
    )


def _print_figures(shown: Shown, drafted: list[Shown], plain: list[Shown], matches: bool, as_json: bool) -> None:
    """`shown` came first, when nothing was warm; speeds are means of those that followed."""
    counts = [run.completion.speculation for run in drafted]
    accepted = tokens_per_forward(count for count in counts if count is not None)
    with_drafts, without = (fmean(run.decode_tokens_per_s for run in each) for each in (drafted, plain))
    timings = shown.completion.timings
    handoff_s = timings.prefill_s + timings.transfer_s
    figures = {
        "ttft_s": shown.ttft_s,
        "decode_tokens_per_s": with_drafts,
        "decode_tokens_per_s_without_drafts": without,
        "tokens_per_forward": accepted,
        "num_prompt_tokens": shown.completion.usage.num_prompt_tokens,
        "num_completion_tokens": shown.completion.usage.num_completion_tokens,
        "kv_bytes": timings.kv_bytes,
        "prefill_s": timings.prefill_s,
        "transfer_s": timings.transfer_s,
        "handoff_s": handoff_s,
        "matches_committed_answer": matches,
    }
    if as_json:
        print_json("demo", **figures)
        return
    console = text_console()
    console.print()
    console.print(f"time to first token   {(shown.ttft_s or 0.0) * 1e3:8.1f} ms")
    console.print(
        f"decode                {with_drafts:8.1f} tokens/s with the draft head, "
        f"{accepted:.2f} tokens a forward; {without:.1f} without"
    )
    console.print(f"KV handed over        {timings.kv_bytes:8d} bytes")
    console.print(
        f"handoff               {handoff_s * 1e3:8.1f} ms, of which {timings.transfer_s * 1e3:.1f} ms after the prefill"
    )
    if matches:
        console.print(f"the {len(shown.completion.token_ids)} tokens are the committed ones", style="green")


def _first_difference(token_ids: tuple[int, ...]) -> str:
    for position, (committed, streamed) in enumerate(zip(TOKEN_IDS, token_ids, strict=False)):
        if committed != streamed:
            return f"token {position} is {streamed}, committed is {committed}"
    return f"{len(token_ids)} tokens were streamed, {len(TOKEN_IDS)} are committed"
