"""The `baton demo` command: serves a real model, checks that it gives the expected answer, then measures the speed of
the pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import typer
from rich.console import Console

from baton.cli import options
from baton.cli.output import Shown, measure, print_json, reported_errors, show, text_console
from baton.cli.prepare_model import prepare_pair
from baton.client import Client, EventStream
from baton.errors import Internal
from baton.events import tokens_per_forward
from baton.full_speed import are_fused, await_fused
from baton.local_pair import LocalPair
from common.text.chat_messages import ChatMessage

_QUESTION = "Why is the sky blue?"
# fmt: off
ANSWER_TOKEN_IDS = (
    504, 2988, 288, 451, 1962, 5721, 281, 260, 7564, 7180, 282, 1420, 284, 2380, 30, 378,
    6376, 4541, 4461, 975, 282, 253, 7613, 1343, 347, 13739, 43464, 24484, 30, 669, 4149, 645,
    1420, 13242, 6756, 282, 1512, 28, 527, 15802, 260, 9895, 20518, 282, 1420, 28, 2755, 260,
    4461, 1420, 28, 281, 253, 970, 338, 4461, 4541, 288, 325, 260, 768, 13490, 30,
)
# fmt: on
"""The answer that must be streamed.

transformers `generate` computed it greedily on SmolLM2-135M-Instruct in float32. The two best logits differ by at least
0.027 everywhere, so the rounding of a correct implementation changes no token.
"""
_FULL_SPEED_TIMEOUT_S = 180.0
# The entry in a service's list of disabled fast paths that makes it compute by PyTorch operators.
_FUSED = "fused_forwards"
_PARITY_DTYPE = "float32"  # in float32 the greedy answer is the same on every machine
_SPEED_DTYPE = "bfloat16"  # the services' default
_OPTIONS = ("--max-rows=4", "--max-kv-tokens=4096")  # the answers are short, so the services need little memory
_HANDS_ALL_OVER = "--local-prefill-tokens=0"  # else the decode service would compute such short prompts itself
_MEASURED_TOKENS = 128
_WARM_UP = "Name the planets of the solar system."
_SPEEDS = {
    True: "at full speed",
    False: "by operators: kernels are not compiled yet",
    None: "at a speed that is perhaps not the full one",
}
_PROMPTS = (
    _QUESTION,
    "Write a short story about a lighthouse.",
    "How do I boil an egg? Answer step by step.",
    "Explain what a hash table is to a beginner.",
)


@dataclass(frozen=True, slots=True)
class _DemoFigures:
    """Measurements of prompts that were answered one at a time.

    `is_full_speed` says whether both services ran fused forwards, the whole model as one compiled program. None means
    that this is not known.
    """

    drafted: Sequence[Shown]
    plain: Sequence[Shown]
    is_full_speed: bool | None

    def as_dict(self) -> dict[str, float | int]:
        timings = [run.completion.timings for run in self.plain]
        counts = [run.completion.speculation for run in self.drafted]
        return {
            "num_prompts": len(self.plain),
            "ttft_s": median(run.ttft_s or 0.0 for run in (*self.drafted, *self.plain)),
            "decode_tokens_per_s": _rate(self.drafted),
            "decode_tokens_per_s_without_drafts": _rate(self.plain),
            "tokens_per_forward": tokens_per_forward(count for count in counts if count is not None),
            "kv_bytes": sum(each.kv_bytes for each in timings),
            "prefill_s": median(each.prefill_s for each in timings),
            "transfer_s": median(each.transfer_s for each in timings),
            "handoff_s": median(each.handoff_s for each in timings),
        }


def _rate(runs: Sequence[Shown]) -> float:
    """Returns decode tokens per second over all prompts, leaving out each first token and the time until it."""
    seconds = sum(run.wall_s - (run.ttft_s or 0.0) for run in runs)
    return sum(len(run.completion.token_ids) - 1 for run in runs) / seconds if seconds > 0 else 0.0


def demo(
    prefill_args: options.PrefillArgs = None,
    decode_args: options.DecodeArgs = None,
    start_timeout_s: Annotated[float, typer.Option(min=0.0)] = 120.0,
    as_json: options.Json = False,
) -> None:
    """Serve SmolLM2-135M and its draft head on two processes, stream an answer, then measure the pair."""
    console = text_console()
    arguments = (prefill_args or [], decode_args or [])
    with reported_errors(as_json):
        with _started(_PARITY_DTYPE, arguments, start_timeout_s, console, as_json) as (pair, client):
            if not as_json:
                console.print(f"\n> {_QUESTION}\n", markup=False)
            answers = [show(_ask_committed(client, speculate=True), as_json=as_json)]
            _reach_full_speed(pair, arguments, console, as_json)
            answers += [measure(_ask_committed(client, speculate=speculate)) for speculate in (True, False)]
        tokens = [each.completion.token_ids for each in answers]
        if differing := next((answer for answer in tokens if answer != ANSWER_TOKEN_IDS), None):
            raise Internal(_first_difference(differing), reason="DEMO_ANSWER_DIFFERS")
        if not as_json:
            agreed = (
                f"\nthe {len(ANSWER_TOKEN_IDS)} tokens are the committed ones, {len(answers)} times of {len(answers)}"
            )
            console.print(f"{agreed} ({_PARITY_DTYPE})", style="green")
        with _started(_SPEED_DTYPE, arguments, start_timeout_s, console, as_json) as (pair, client):
            is_full_speed = _reach_full_speed(pair, arguments, console, as_json)
            figures = _measure(client, is_full_speed)
    if as_json:
        print_json(
            "demo",
            dtype=_SPEED_DTYPE,
            is_full_speed=figures.is_full_speed,
            **figures.as_dict(),
            matches_committed_answer=True,
        )
    else:
        _print(figures)


@contextmanager
def _started(
    dtype: str, arguments: tuple[list[str], list[str]], start_timeout_s: float, console: Console, as_json: bool
) -> Iterator[tuple[LocalPair, Client]]:
    pair = LocalPair(
        model="demo",
        device="cpu",
        dtype=dtype,
        prefill_args=[*_OPTIONS, *arguments[0]],
        decode_args=[*_OPTIONS, _HANDS_ALL_OVER, *arguments[1]],
        start_timeout_s=start_timeout_s,
        exposes_metrics=True,
    )
    prepare_pair(pair, as_json=as_json)
    if not as_json:
        console.print(f"starting a prefill and a decode process ({dtype})", style="dim")
    with pair, Client(pair.decode_addresses[0]) as client:
        if not as_json:
            console.print(
                ", ".join(f"{each.name} (pid {each.pid}, {each.address})" for each in pair.services), style="dim"
            )
        yield pair, client


def _reach_full_speed(
    pair: LocalPair, arguments: tuple[list[str], list[str]], console: Console, as_json: bool
) -> bool | None:
    """Waits until the services have compiled their kernels, which the first start on a machine has to do.

    `arguments` are the user's arguments for the prefill and the decode service. If they set `fused_forwards`, by which
    a service compiles the whole model, that service is not waited for.

    Returns True when the kernels are compiled, False if the time limit passed first. If the metrics pages do not
    answer, it prints the reason and returns None.
    """
    fusing = [
        address
        for address, given in zip(pair.metrics_addresses, arguments, strict=True)
        if not any(_FUSED in argument for argument in given)
    ]
    try:
        if are_fused(fusing):
            return True
        if not as_json:
            console.print("\ncompiling kernels, once on this machine", style="dim")
        return await_fused(fusing, timeout_s=_FULL_SPEED_TIMEOUT_S)
    except OSError as error:
        console.print(f"\nit is not known whether kernels are compiled: {error}", style="yellow", markup=False)
        return None


def _measure(client: Client, is_full_speed: bool | None) -> _DemoFigures:
    """Measures each prompt with and without drafts.

    Which of the two goes first alternates, so that a change in the machine's speed affects both alike.
    """

    def answered(prompt: str, speculate: bool) -> Shown:
        return measure(_ask(client, prompt, max_tokens=_MEASURED_TOKENS, speculate=speculate))

    for speculate in (True, False, True):  # warms up; the depth policy of speculative decoding learns from requests
        answered(_WARM_UP, speculate)
    runs: dict[bool, list[Shown]] = {True: [], False: []}
    for number, prompt in enumerate(_PROMPTS):
        for speculate in (True, False) if number % 2 else (False, True):
            runs[speculate].append(answered(prompt, speculate))
    return _DemoFigures(runs[True], runs[False], is_full_speed)


def _ask_committed(client: Client, *, speculate: bool) -> EventStream:
    return _ask(client, _QUESTION, max_tokens=len(ANSWER_TOKEN_IDS), speculate=speculate)


def _ask(client: Client, prompt: str, *, max_tokens: int, speculate: bool) -> EventStream:
    return client.generate(
        chat=[ChatMessage("user", prompt)],
        temperature=0.0,
        max_tokens=max_tokens,
        timeout_s=120.0,
        speculate=speculate,
    )


def _print(figures: _DemoFigures) -> None:
    console, speed = text_console(), _SPEEDS[figures.is_full_speed]
    shown = figures.as_dict()
    console.print(f"\n{shown['num_prompts']} prompts, one at a time, {_SPEED_DTYPE}, {speed}")
    console.print(f"time to first token   {shown['ttft_s'] * 1e3:8.1f} ms")
    console.print(
        f"decode                {shown['decode_tokens_per_s']:8.1f} tokens/s with the draft head, "
        f"{shown['tokens_per_forward']:.2f} tokens a forward; "
        f"{shown['decode_tokens_per_s_without_drafts']:.1f} without"
    )
    console.print(f"KV handed over        {shown['kv_bytes']:8d} bytes, of all prompts together")
    console.print(
        f"handoff               {shown['handoff_s'] * 1e3:8.1f} ms a prompt, "
        f"of which {shown['transfer_s'] * 1e3:.1f} ms after the prefill"
    )


def _first_difference(token_ids: tuple[int, ...]) -> str:
    for position, (committed, streamed) in enumerate(zip(ANSWER_TOKEN_IDS, token_ids, strict=False)):
        if committed != streamed:
            return f"token {position} is {streamed}, committed is {committed}"
    return f"{len(token_ids)} tokens were streamed, {len(ANSWER_TOKEN_IDS)} are committed"
