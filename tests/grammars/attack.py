"""Sends hostile grammars to a running pair, and measures how well another client is served meanwhile.

python -m tests.grammars.attack [--minutes 20]

The attackers are silent, send harmless grammars, and send hostile ones, in turn. The other client streams all the time,
and brings a new grammar of its own now and then. Exits with status 1 if a service ends, an answer is not a documented
one, or a wait is too long.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from baton import Client
from baton.errors import BatonError, InvalidArgument, ResourceExhausted
from baton.local_pair import LocalPair
from common.grammar.grammar import Grammar, GrammarKind
from tests.grammars.hostile import hostile_grammar, is_list_of_texts

WINDOW_S = 10.0
SILENT, HARMLESS, HOSTILE = "silent", "harmless", "hostile"
MODES = (SILENT, HARMLESS, HOSTILE)
NUM_ATTACKERS = 4
ATTACK_TOKENS = 16
MAX_ANSWER_S = 60.0
NEW_GRAMMAR_INTERVAL_S = 1.0


class Figures:
    """What the clients measured, by what the attackers did at the time. Any thread may add to it."""

    def __init__(self) -> None:
        self.mode = SILENT
        self.num_tokens: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.gaps_s: dict[str, list[float]] = defaultdict(list)
        self.compile_s: dict[str, list[float]] = defaultdict(list)
        self.ends: Counter[str] = Counter()
        self.faults: list[str] = []
        self.slowest_s = 0.0
        self.slowest: Grammar | None = None
        self.peak_bytes = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    figures = Figures()
    with tempfile.TemporaryDirectory() as name, _pair(Path(name)) as pair:
        address, is_over = pair.decode_addresses[0], threading.Event()
        threads = [
            threading.Thread(target=_stream, args=(address, figures, is_over)),
            threading.Thread(target=_bring_new_grammars, args=(address, figures, is_over)),
            threading.Thread(target=_watch_memory, args=(pair, figures, is_over)),
            *(
                threading.Thread(target=_attack, args=(address, figures, is_over, options.seed + number))
                for number in range(NUM_ATTACKERS)
            ),
        ]
        for thread in threads:
            thread.start()
        end_s = time.monotonic() + 60 * options.minutes
        for mode in itertools.cycle(MODES):
            if time.monotonic() > end_s:
                break
            figures.mode = mode
            before, began_s = figures.num_tokens[mode], time.monotonic()
            time.sleep(WINDOW_S)
            took_s = time.monotonic() - began_s
            figures.seconds[mode] += took_s
            print(f"{mode:9} {(figures.num_tokens[mode] - before) / took_s:7.1f} tokens/s", flush=True)
        is_over.set()
        for thread in threads:
            thread.join()
        figures.faults += [f"{each.name} has ended" for each in pair.services if not each.is_running]
    _print(figures)
    return 1 if figures.faults else 0


@contextmanager
def _pair(directory: Path) -> Iterator[LocalPair]:
    """Runs the demo model in a pair that knows two client tokens: one for the attackers, and one for the other
    client.
    """
    tokens = directory / "tokens"
    tokens.write_text("\n".join(TOKENS))
    tokens.chmod(0o600)
    with LocalPair(decode_args=(f"--auth-token-file={tokens}",)) as pair:
        yield pair


TOKENS = ("the-other-client", "the-attackers")


def _stream(address: str, figures: Figures, is_over: threading.Event) -> None:
    with Client(address, token=TOKENS[0]) as client:
        while not is_over.is_set():
            last_s = time.monotonic()
            for event in client.generate("Once upon a time", max_tokens=256, ignore_eos=True):
                if is_over.is_set():
                    break
                now_s, mode = time.monotonic(), figures.mode
                figures.num_tokens[mode] += len(getattr(event, "token_ids", ()))
                figures.gaps_s[mode].append(now_s - last_s)
                last_s = now_s


def _bring_new_grammars(address: str, figures: Figures, is_over: threading.Event) -> None:
    with Client(address, token=TOKENS[0]) as client:
        for number in itertools.count():
            if is_over.wait(NEW_GRAMMAR_INTERVAL_S):
                return
            schema = {
                "type": "object",
                "properties": {f"key {number}": {"type": "integer"}},
                "required": [f"key {number}"],
            }
            mode, began_s = figures.mode, time.monotonic()
            try:
                client.complete("JSON:", max_tokens=1, json_schema=json.dumps(schema))
            except BatonError as error:
                figures.faults.append(f"another client's grammar: {error}")
            figures.compile_s[mode].append(time.monotonic() - began_s)


def _attack(address: str, figures: Figures, is_over: threading.Event, seed: int) -> None:
    draw = random.Random(seed)
    with Client(address, token=TOKENS[1]) as client:
        while not is_over.is_set():
            mode = figures.mode
            if mode == SILENT:
                time.sleep(0.05)
                continue
            harmless = Grammar(GrammarKind.REGEX, f"[a-z ]{{{draw.randrange(9, 99)},}}")
            grammar = hostile_grammar(draw) if mode == HOSTILE else harmless
            if grammar.kind is GrammarKind.CHOICE and not is_list_of_texts(grammar.text):
                continue
            began_s = time.monotonic()
            end = _sent(client, grammar, figures)
            took_s = time.monotonic() - began_s
            figures.ends[f"{mode}: {end}"] += 1
            if took_s > figures.slowest_s:
                figures.slowest_s, figures.slowest = took_s, grammar
            if took_s > MAX_ANSWER_S:
                figures.faults.append(f"{took_s:.0f} s for {grammar.kind} {grammar.text[:200]!r}")


def _sent(client: Client, grammar: Grammar, figures: Figures) -> str:
    is_choice = grammar.kind is GrammarKind.CHOICE
    options: dict[str, Any] = {grammar.kind.value: grammar.choices if is_choice else grammar.text}
    try:
        return client.complete("x", max_tokens=ATTACK_TOKENS, **options).finish_reason
    except (InvalidArgument, ResourceExhausted) as error:
        if isinstance(error, InvalidArgument) and not error.field:
            figures.faults.append(f"no field: {error}")
        return type(error).__name__
    except BatonError as error:
        figures.faults.append(f"{type(error).__name__} {error} of {grammar.kind} {grammar.text[:200]!r}")
        return type(error).__name__


def _watch_memory(pair: LocalPair, figures: Figures, is_over: threading.Event) -> None:
    roots = [psutil.Process(service.pid) for service in pair.services]
    while not is_over.wait(0.2):
        total = 0
        for process in (each for root in roots for each in (root, *root.children(recursive=True))):
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        figures.peak_bytes = max(figures.peak_bytes, total)


def _print(figures: Figures) -> None:
    for mode in MODES:
        gaps_s, compile_s = sorted(figures.gaps_s[mode]), sorted(figures.compile_s[mode])
        print(
            f"{mode:9} {figures.num_tokens[mode] / figures.seconds[mode]:7.1f} tokens/s, between events p99 "
            f"{gaps_s[len(gaps_s) * 99 // 100] * 1e3:.0f} and at most {gaps_s[-1] * 1e3:.0f} ms; a new grammar's first "
            f"token after {statistics.median(compile_s) * 1e3:.0f} ms, at most {compile_s[-1] * 1e3:.0f}"
        )
    print(f"{dict(sorted(figures.ends.items()))}")
    print(f"slowest answer {figures.slowest_s:.1f} s: {figures.slowest and figures.slowest.text[:200]!r}")
    print(f"memory of all processes at most {figures.peak_bytes >> 20} MiB; faults {len(figures.faults)}")
    for fault in figures.faults[:20]:
        print(fault, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
