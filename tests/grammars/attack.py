"""Sends hostile grammars to a running pair, and measures how well another client is served meanwhile.

python -m tests.grammars.attack [--minutes 20]

The attackers are silent, send harmless grammars, and send hostile ones, in turn. The other client streams all the time,
and brings a new grammar of its own now and then. Exits with status 1 if a service ends, an answer is not a documented
one, a wait is too long, hostile grammars slow the other client's stream more than harmless ones do, or the services
take more memory than grammars may.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from baton import Client
from baton.errors import BatonError, InvalidArgument, ResourceExhausted
from baton.full_speed import await_fused
from baton.local_pair import LocalPair
from common.grammar.grammar import Grammar, GrammarKind
from common.text.grammar_compiler import LIMITS
from tests.grammars.hostile import hostile_grammar, is_list_of_texts

FULL_SPEED_TIMEOUT_S = 300.0
WINDOW_S = 10.0
SETTLE_S = 2.0
"""How long what the attackers sent in one window may go on in the next. It does not count."""
SILENT, HARMLESS, HOSTILE = "silent", "harmless", "hostile"
MODES = (SILENT, HARMLESS, HOSTILE)
NUM_ATTACKERS = 4
ATTACK_TOKENS = range(1, 32)
"""The lengths that attackers ask for, at random. With one length for all, harmless requests would end together, so that
their prompts share forwards, and hostile ones would not.
"""
MAX_ANSWER_S = 60.0
NEW_GRAMMAR_INTERVAL_S = 1.0
MIN_SHARE = 0.8
"""The least tokens/s of the other client in a hostile window, as a share of those in the harmless one before it. Single
windows vary more than that, so the median of the shares counts.
"""
MAX_GROWTH_BYTES = 2 * (LIMITS.memory_bytes + (512 << 20))
"""The most memory that grammars may take: each of the two services tries one at a time, and keeps some. Caches may take
more, but those of 2,000 hostile grammars take 0.1 GiB.
"""


class Figures:
    """What the clients measured, by what the attackers did at the time. Any thread may add to it."""

    def __init__(self) -> None:
        self.mode = HARMLESS
        self.num_tokens = 0
        self.rates: dict[str, list[float]] = defaultdict(list)
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
        if not await_fused(pair.metrics_addresses, timeout_s=FULL_SPEED_TIMEOUT_S):
            print("forwards are not fused: the first windows may differ from later ones", flush=True)
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
        time.sleep(WINDOW_S)  # harmless grammars start the processes that try them
        usual_bytes = figures.peak_bytes
        end_s = time.monotonic() + 60 * options.minutes
        for mode in itertools.cycle(MODES):
            if time.monotonic() > end_s or not all(each.is_alive() for each in threads):
                break
            figures.mode = mode
            time.sleep(SETTLE_S)
            before, began_s = figures.num_tokens, time.monotonic()
            time.sleep(WINDOW_S - SETTLE_S)
            rate = (figures.num_tokens - before) / (time.monotonic() - began_s)
            figures.rates[mode].append(rate)
            print(f"{mode:9} {rate:7.1f} tokens/s", flush=True)
        figures.faults += [f"{each.name} of the clients has ended" for each in threads if not each.is_alive()]
        is_over.set()
        for thread in threads:
            thread.join()
        figures.faults += [f"{each.name} has ended" for each in pair.services if not each.is_running]
    growth_bytes = figures.peak_bytes - usual_bytes
    figures.faults += harms(figures.rates, growth_bytes)
    _print(figures, growth_bytes)
    return 1 if figures.faults else 0


def harms(rates: Mapping[str, Sequence[float]], growth_bytes: int) -> list[str]:
    """Returns what hostile grammars did to others, in words: nothing if they did no harm.

    `rates` are another client's tokens/s in each window, by what the attackers did. `growth_bytes` is the memory that
    the services took meanwhile.
    """
    found = []
    if not rates.get(HOSTILE):
        found.append("no window with hostile grammars was measured")
    if (share := _hostile_share(rates)) < MIN_SHARE:
        found.append(f"another client got {share:.2f} of its tokens/s under hostile grammars, less than {MIN_SHARE}")
    if growth_bytes > MAX_GROWTH_BYTES:
        found.append(f"memory grew by {growth_bytes >> 20} MiB, more than {MAX_GROWTH_BYTES >> 20}")
    return found


def _hostile_share(rates: Mapping[str, Sequence[float]]) -> float:
    """Returns the median, over neighbouring windows, of the tokens/s in a hostile one as a share of those in the
    harmless one before it. It is 1 if no hostile window was measured.
    """
    pairs = list(zip(rates.get(HARMLESS, ()), rates.get(HOSTILE, ()), strict=False))
    return statistics.median(hostile / harmless if harmless else 0.0 for harmless, hostile in pairs) if pairs else 1.0


@contextmanager
def _pair(directory: Path) -> Iterator[LocalPair]:
    """Runs the demo model in a pair that knows two client tokens: one for the attackers, and one for the other
    client.
    """
    tokens = directory / "tokens"
    tokens.write_text("\n".join(TOKENS))
    tokens.chmod(0o600)
    with LocalPair(decode_args=(f"--auth-token-file={tokens}",), exposes_metrics=True) as pair:
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
                figures.num_tokens += len(getattr(event, "token_ids", ()))
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
            end = _sent(client, grammar, draw.choice(ATTACK_TOKENS), figures)
            took_s = time.monotonic() - began_s
            figures.ends[f"{mode}: {end}"] += 1
            if took_s > figures.slowest_s:
                figures.slowest_s, figures.slowest = took_s, grammar
            if took_s > MAX_ANSWER_S:
                figures.faults.append(f"{took_s:.0f} s for {grammar.kind} {grammar.text[:200]!r}")


def _sent(client: Client, grammar: Grammar, max_tokens: int, figures: Figures) -> str:
    is_choice = grammar.kind is GrammarKind.CHOICE
    options: dict[str, Any] = {grammar.kind.value: grammar.choices if is_choice else grammar.text}
    try:
        return client.complete("x", max_tokens=max_tokens, **options).finish_reason
    except (InvalidArgument, ResourceExhausted) as error:
        if isinstance(error, InvalidArgument) and not error.field:
            figures.faults.append(f"no field: {error}")
        return type(error).__name__
    except BatonError as error:
        figures.faults.append(f"{type(error).__name__} {error} of {grammar.kind} {grammar.text[:200]!r}")
        return type(error).__name__


def _watch_memory(pair: LocalPair, figures: Figures, is_over: threading.Event) -> None:
    """Records the most memory of the services and their children. The KV pool of the prefill service does not count:
    the decode service reads more and more of it in shared memory.
    """
    roots = [psutil.Process(service.pid) for service in pair.services]
    while not is_over.wait(0.2):
        total = 0
        for process in (each for root in roots for each in (root, *root.children(recursive=True))):
            try:
                memory = process.memory_info()
            except psutil.NoSuchProcess:
                continue
            total += memory.rss - memory.shared
        figures.peak_bytes = max(figures.peak_bytes, total)


def _print(figures: Figures, growth_bytes: int) -> None:
    for mode, rates in figures.rates.items():
        gaps_s, compile_s = sorted(figures.gaps_s[mode]), sorted(figures.compile_s[mode])
        print(
            f"{mode:9} {statistics.median(rates):7.1f} tokens/s, between events p99 "
            f"{gaps_s[len(gaps_s) * 99 // 100] * 1e3:.0f} and at most {gaps_s[-1] * 1e3:.0f} ms; a new grammar's first "
            f"token after {statistics.median(compile_s) * 1e3:.0f} ms, at most {compile_s[-1] * 1e3:.0f}"
        )
    print(f"{dict(sorted(figures.ends.items()))}")
    print(f"slowest answer {figures.slowest_s:.1f} s: {figures.slowest and figures.slowest.text[:200]!r}")
    print(f"hostile windows have {_hostile_share(figures.rates):.2f} of the tokens/s of the harmless ones before them")
    print(f"memory at most {figures.peak_bytes >> 20} MiB, {growth_bytes >> 20} more than before the attack")
    print(f"faults {len(figures.faults)}")
    for fault in figures.faults[:20]:
        print(fault, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
