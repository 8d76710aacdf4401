"""Tests that compiling grammars is bounded: a grammar that takes too much is refused, runs nowhere in the service, and
delays no other.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.errors import InvalidRequest, Overloaded
from common.grammar.grammar import Grammar, GrammarKind
from common.grammar.matcher import Matcher, num_words
from common.text.grammar_compiler import LIMITS, GrammarCompiler, GrammarTrials
from common.text.grammars import LEXER_BYTES, MAX_CACHED_BYTES, Grammars
from common.text.turns import Turns
from tests.decode_edge.children import children_running
from tests.decode_edge.edge_under_test import believed
from tests.decode_edge.tokenizers_for_tests import byte_level, eos_id, grammars_of, vocab_size

BOUND_S = 60.0
SMALL = Grammar(GrammarKind.REGEX, "ab")
SLOW = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "patternProperties": {f"^{place}x": {"type": "string", "maxLength": 5000 + place} for place in range(180)},
        }
    ),
)
DEEP = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "$defs": {
                f"d{place}": {
                    "type": "object",
                    "properties": {"a": {"$ref": f"#/$defs/d{place + 1}"}},
                    "required": ["a"],
                }
                for place in range(600)
            }
            | {"d600": {"type": "string"}},
            "$ref": "#/$defs/d0",
        }
    ),
)
DOUBLING = Grammar(GrammarKind.LARK, 'start: start start | "a" |')


class HeldUp(Grammars):
    """Makes no matcher of SMALL while `may_go_on` is not set."""

    def __init__(self) -> None:
        tokenizer = byte_level()
        super().__init__(lambda: tokenizer, vocab_size=vocab_size(tokenizer), eos_token_ids=[eos_id(tokenizer)])
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def matcher(self, grammar: Grammar | None, *args: Any, **options: Any) -> Matcher:
        if grammar == SMALL:
            self.may_go_on.wait()
        return super().matcher(grammar, *args, **options)


@asynccontextmanager
async def compiler_of(grammars: Grammars, **limits: Any) -> AsyncIterator[GrammarCompiler]:
    async with (
        GrammarTrials(grammars.vocabulary, limits=replace(LIMITS, **limits)) as trials,
        GrammarCompiler(grammars, trials.try_out, max_wait_s=BOUND_S) as compiler,
    ):
        yield compiler


def trial_pids() -> list[int]:
    return children_running("grammar_trial_process")


@pytest.mark.parametrize(
    ("grammar", "limits", "words"),
    [
        (SLOW, {"cpu_s": 0.12}, r"takes more than 0\.12 s of the processor to compile"),
        (SLOW, {"memory_bytes": LIMITS.stack_bytes + (2 << 20)}, "needs more memory to compile"),
        (DEEP, {"stack_bytes": 128 << 10}, "needs more memory to compile"),
    ],
    ids=["time", "memory", "stack"],
)
async def test_a_grammar_that_takes_too_much_is_refused_and_the_next_one_is_compiled(
    grammar: Grammar, limits: dict[str, Any], words: str
) -> None:
    grammars = grammars_of(byte_level())
    async with compiler_of(grammars, **limits) as compiler:
        await compiler.matcher(SMALL)
        (pid,) = trial_pids()
        with pytest.raises(InvalidRequest, match=rf"sampling\.json_schema: {words}"):
            await compiler.matcher(grammar)
        assert grammar not in grammars
        await compiler.matcher(Grammar(GrammarKind.REGEX, "cd"))
        assert trial_pids() == [pid]
    grammars.matcher(grammar)  # it is the limits that it was refused for


async def test_a_trial_that_lacks_time_because_the_machine_is_busy_is_no_fault_of_the_grammar() -> None:
    async with compiler_of(grammars_of(byte_level()), timeout_s=0.01) as compiler:
        with pytest.raises(Overloaded, match=r"the machine did not compile it within 0\.01 s"):
            await compiler.matcher(SLOW)


async def test_a_trial_that_gets_no_thread_is_no_fault_of_the_grammar() -> None:
    async with compiler_of(grammars_of(byte_level()), stack_bytes=1 << 40) as compiler:
        with pytest.raises(Overloaded, match="can't start new thread"):
            await compiler.matcher(SMALL)


async def test_a_process_that_was_killed_is_replaced_and_none_is_left_at_the_end() -> None:
    async with compiler_of(grammars_of(byte_level())) as compiler:
        await compiler.matcher(SMALL)
        (pid,) = trial_pids()
        os.kill(pid, signal.SIGKILL)
        await compiler.matcher(Grammar(GrammarKind.REGEX, "cd"))
        (other,) = trial_pids()
        assert other != pid
    assert not trial_pids()


async def test_a_model_without_end_tokens_serves_no_grammar_and_starts_no_process() -> None:
    grammars = Grammars(byte_level, vocab_size=vocab_size(byte_level()), eos_token_ids=[])
    async with compiler_of(grammars) as compiler:
        with pytest.raises(InvalidRequest, match="has no token that ends an output"):
            await compiler.matcher(SMALL)
        assert not trial_pids()


async def test_a_client_that_leaves_during_a_trial_costs_no_process() -> None:
    async with compiler_of(grammars_of(byte_level())) as compiler:
        await compiler.matcher(SMALL)
        (pid,) = trial_pids()
        left = asyncio.create_task(compiler.matcher(SLOW))
        for _ in range(3):  # until the process gets the request
            await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await compiler.matcher(Grammar(GrammarKind.REGEX, "cd"))
        assert trial_pids() == [pid]


async def test_only_a_new_grammar_is_tried() -> None:
    tried = []

    async def try_out(grammar: Grammar) -> int:
        tried.append(grammar)
        return 0

    async with GrammarCompiler(grammars_of(byte_level()), try_out) as compiler:
        await asyncio.gather(*(compiler.matcher(SMALL) for _ in range(3)))
    assert tried == [SMALL]


async def test_a_grammar_that_is_slow_to_follow_fails_alone() -> None:
    """Each call to the library stays within its limits, but the calls together take too long. The output that a resumed
    request brings is followed under the same limit.
    """
    output_ids = byte_level().encode("a" * 2000)
    async with compiler_of(grammars_of(byte_level())) as compiler:
        matcher = await compiler.matcher(DOUBLING)
        copy = matcher.copy()
        began_s = time.thread_time()
        assert not all(map(matcher.accept, output_ids))
        assert time.thread_time() - began_s < 2.0
        assert matcher.failure == copy.failure == "its masks take too long"
        mask = np.ones(num_words(vocab_size(byte_level())), np.int32)
        matcher.fill(mask)
        assert not mask.any()
        with pytest.raises(
            InvalidRequest, match=r"sampling\.lark: is too large or too ambiguous for the output so far"
        ):
            await compiler.matcher(DOUBLING, output_ids)
        assert not (await compiler.matcher(DOUBLING, output_ids[:40])).failure


async def test_the_wait_for_a_turn_is_bounded() -> None:
    may_end = asyncio.Event()

    async def try_out(grammar: Grammar) -> int:
        await may_end.wait()
        return 0

    async with GrammarCompiler(grammars_of(byte_level()), try_out, max_wait_s=0.01) as compiler:
        first = asyncio.create_task(compiler.matcher(SMALL, client="first"))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match=r"wait for more than 0\.01 s"):
            await compiler.matcher(DOUBLING, client="second")
        may_end.set()
        await first
        await compiler.matcher(DOUBLING, client="second")


async def test_known_grammars_wait_for_no_new_one_but_for_their_turn() -> None:
    tried, may_end = asyncio.Event(), asyncio.Event()

    async def try_out(grammar: Grammar) -> int:
        if grammar == SLOW:
            tried.set()
            await may_end.wait()
        return 0

    output_ids = byte_level().encode("a")
    async with GrammarCompiler(grammars_of(byte_level()), try_out, max_wait_s=2 * BOUND_S) as compiler:
        await compiler.matcher(SMALL, client="first")
        slow = asyncio.create_task(compiler.matcher(SLOW, client="second"))
        await tried.wait()
        async with asyncio.timeout(BOUND_S):
            await compiler.matcher(SMALL, client="first")
            await compiler.matcher(SMALL, output_ids, client="first")
        assert not slow.done()
        may_end.set()
        await slow


async def test_known_grammars_take_turns_and_do_not_wait_for_ever() -> None:
    grammars = HeldUp()
    async with GrammarCompiler(grammars, believed, max_wait_s=0.01) as compiler:
        await compiler.matcher(SMALL)
        grammars.may_go_on.clear()
        first = asyncio.create_task(compiler.matcher(SMALL, client="first"))
        await asyncio.sleep(0)
        second = asyncio.create_task(compiler.matcher(SMALL, client="second"))
        ended, _ = await asyncio.wait([second], timeout=BOUND_S)
        grammars.may_go_on.set()
        await first
        assert ended
        with pytest.raises(Overloaded, match=r"wait for more than 0\.01 s"):
            await second


@pytest.mark.parametrize("output", ["", "a"], ids=["copied", "replayed"])
async def test_a_grammar_that_leaves_the_cache_while_it_waits_for_its_turn_is_tried_again(output: str) -> None:
    tried = []
    other, large = Grammar(GrammarKind.REGEX, "ac"), Grammar(GrammarKind.REGEX, "ad")

    async def try_out(grammar: Grammar) -> int:
        tried.append(grammar)
        return MAX_CACHED_BYTES - LEXER_BYTES if grammar == large else 0

    output_ids = byte_level().encode(output)
    grammars = HeldUp()
    async with GrammarCompiler(grammars, try_out) as compiler:
        await compiler.matcher(SMALL)
        await compiler.matcher(other)
        grammars.may_go_on.clear()
        first = asyncio.create_task(compiler.matcher(SMALL, output_ids, client="first"))
        await asyncio.sleep(0)
        second = asyncio.create_task(compiler.matcher(other, output_ids, client="second"))
        await asyncio.sleep(0)
        await compiler.matcher(large, client="third")
        assert other not in grammars
        grammars.may_go_on.set()
        await first
        await second
        assert tried == [SMALL, other, large, other]
        await compiler.matcher(other, output_ids, client="first")  # the turn that was of no use has ended


async def test_a_grammar_that_leaves_the_cache_when_its_turn_has_come_counts_for_as_much_as_before() -> None:
    tried = []
    large = Grammar(GrammarKind.REGEX, "ac")

    async def try_out(grammar: Grammar) -> int:
        tried.append(grammar)
        return MAX_CACHED_BYTES - LEXER_BYTES if grammar == large else 1000

    grammars = HeldUp()
    async with GrammarCompiler(grammars, try_out) as compiler:
        await compiler.matcher(SMALL, client="first")
        grammars.may_go_on.clear()
        first = asyncio.create_task(compiler.matcher(SMALL, client="first"))
        await asyncio.sleep(0)
        await compiler.matcher(large, client="second")
        has_left = SMALL not in grammars
        grammars.may_go_on.set()
        await first
        assert has_left
        assert grammars.num_bytes_of(SMALL) == 1000
        assert tried == [SMALL, large]


class Clients:
    """Clients that wait for their turn to compile (Turns), and record the order of the turns. The clock moves only by
    the time that their work takes.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns = Turns(1, clock=lambda: self.now_s)
        self.had: list[str] = []
        self.may_end = asyncio.Semaphore(0)
        self._tasks: list[asyncio.Task[None]] = []

    async def ask(self, *clients: str, took_s: float = 1.0) -> None:
        self._tasks += [asyncio.create_task(self._work(client, took_s)) for client in clients]
        await asyncio.sleep(0)

    async def _work(self, client: str, took_s: float) -> None:
        name, _, tenant = client.partition("/")
        began_s = await self.turns.take((name, tenant))
        self.had.append(client)
        await self.may_end.acquire()
        self.now_s += took_s
        self.turns.give_back((name, tenant), began_s)

    async def leave(self, place: int) -> None:
        self._tasks.pop(place).cancel()
        await asyncio.sleep(0)

    async def all_over(self) -> list[str]:
        for _ in self._tasks:
            self.may_end.release()
        await asyncio.gather(*self._tasks)
        return self.had


async def test_the_client_that_used_the_least_time_is_next() -> None:
    clients = Clients()
    await clients.ask("slow", "slow", "slow", took_s=5.0)
    await clients.ask(*["quick"] * 4)
    assert await clients.all_over() == ["slow", *["quick"] * 4, "slow", "slow"]


async def test_a_client_that_comes_late_has_no_time_saved_up() -> None:
    clients = Clients()
    await clients.ask(*["first"] * 3)
    for _ in range(2):
        clients.may_end.release()
    for _ in range(9):
        await asyncio.sleep(0)
    assert clients.had == ["first"] * 3
    await clients.ask(*["late"] * 2, *["first"] * 2)
    assert await clients.all_over() == [*["first"] * 3, "late", "first", "late", "first"]


async def test_tenants_of_a_client_take_turns_and_have_its_time_together() -> None:
    clients = Clients()
    await clients.ask(*["gateway/a"] * 4, "gateway/b", "gateway/b", "other", "other", "other")
    assert await clients.all_over() == [
        *("gateway/a", "other", "gateway/b", "other", "gateway/a", "other", "gateway/b", "gateway/a", "gateway/a")
    ]


async def test_a_caller_that_leaves_is_passed_over() -> None:
    clients = Clients()
    await clients.ask("a", "b", "c")
    await clients.leave(1)
    assert await clients.all_over() == ["a", "c"]


async def test_a_caller_that_waits_for_itself_may_leave() -> None:
    clients = Clients()
    await clients.ask("a", "a")
    await clients.leave(1)
    assert await clients.all_over() == ["a"]
    await clients.ask("a", "b")
    assert await clients.all_over() == ["a", "a", "b"]


async def test_a_caller_that_leaves_when_it_gets_the_turn_passes_it_on() -> None:
    clients = Clients()
    began_s = await clients.turns.take(("a", ""))
    await clients.ask("b", "c")
    clients.turns.give_back(("a", ""), began_s)
    await clients.leave(0)
    assert await clients.all_over() == ["c"]
    await clients.turns.take(("a", ""))
