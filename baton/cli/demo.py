"""`baton demo`: the whole path once, on a real model, checked against a committed answer."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli import options
from baton.cli.demo_answer import QUESTION, TOKEN_IDS
from baton.cli.output import print_json, reported_errors, text_console
from baton.cli.prepare_model import DEMO_MODEL, prepare_model
from baton.cli.stream import Shown, show
from baton.client import Client
from baton.errors import Internal
from baton.local_pair import LocalPair
from baton.requests import ChatMessage

_DTYPE = "float32"  # in it the greedy answer is the same on every machine
_SIZE = ("--max-rows=4", "--max-kv-tokens=2048")  # one short answer: start fast, take little memory


def demo(
    prefill_args: options.PrefillArgs = None,
    decode_args: options.DecodeArgs = None,
    start_timeout_s: Annotated[float, typer.Option(min=0.0)] = 120.0,
    as_json: options.Json = False,
) -> None:
    """Serve SmolLM2-135M on a prefill and a decode process, stream an answer, print what it took."""
    console = text_console()
    with reported_errors(as_json):
        prepare_model(DEMO_MODEL, as_json=as_json)
        if not as_json:
            console.print("starting a prefill and a decode process", style="dim")
        pair = LocalPair(
            model=DEMO_MODEL,
            device="cpu",
            dtype=_DTYPE,
            prefill_args=[*_SIZE, *(prefill_args or ())],
            decode_args=[*_SIZE, *(decode_args or ())],
            start_timeout_s=start_timeout_s,
        )
        with pair, Client(pair.decode_addresses[0]) as client:
            if not as_json:
                pids = ", ".join(f"{each.name} (pid {each.pid}, {each.address})" for each in pair.services)
                console.print(pids, style="dim")
                console.print(f"\n> {QUESTION}\n", markup=False)
            events = client.generate(
                chat=[ChatMessage("user", QUESTION)], temperature=0.0, max_tokens=len(TOKEN_IDS), timeout_s=120.0
            )
            shown = show(events, as_json=as_json)
        matches = shown.completion.token_ids == TOKEN_IDS
        _print_figures(shown, matches, as_json)
        if not matches:
            raise Internal(_first_difference(shown.completion.token_ids), reason="DEMO_ANSWER_DIFFERS")


def _print_figures(shown: Shown, matches: bool, as_json: bool) -> None:
    timings = shown.completion.timings
    handoff_s = timings.prefill_s + timings.transfer_s
    figures = {
        "ttft_s": shown.ttft_s,
        "decode_tokens_per_s": shown.decode_tokens_per_s,
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
    console.print(f"decode                {shown.decode_tokens_per_s:8.1f} tokens/s")
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
