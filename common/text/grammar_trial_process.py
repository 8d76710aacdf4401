"""A process that tries to compile grammars: `python -m common.text.grammar_trial_process FILE TIMEOUT_S`.

A grammar is written by a client, and its compilation can take long, need much memory, or crash. So each one is tried in
a forked copy of this process with limits of its own; if it exceeds them, only the copy is killed. Requests are JSON
(see `common.host.answering`). The first one is a vocabulary and the limits; its answer is DONE. Each later one is a
grammar. Its answer is DONE with the number of bytes that the compiled grammar takes, FAILED with the reason, or LATE if
the machine had too little time, or no thread, for the trial.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from common.grammar.grammar import Grammar, GrammarKind
from common.host.answering import DONE, FAILED, Asker
from common.host.memory import limit_own_memory, own_bytes
from common.peer_text import peer_text
from common.text.grammars import GrammarRefused, Grammars

_NICENESS = 10
"""Beside a computing thread on the same core, a trial gets a tenth of its time. So those who send many new grammars
hardly slow other clients' forwards, and a trial still ends in time.
"""
LATE = 2
_TOO_LARGE = "needs more memory to compile than a grammar may"


@dataclass(frozen=True, slots=True)
class TokenTable:
    """A vocabulary without its tokenizer: the bytes of each token, and the ids that are `skipped` (special tokens)."""

    tokens: Sequence[bytes]
    skipped: frozenset[int]

    def bytes_of(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def is_skipped(self, token_id: int) -> bool:
        return token_id in self.skipped

    def encode(self, text: str, *, adds_special_tokens: bool) -> tuple[int, ...]:
        return ()  # which tokens are the usual ones is not needed to find out what a grammar costs


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one trial: processor time, wall-clock time, and memory beyond what this process has already.

    `stack_bytes` of the memory are for the stack.
    """

    cpu_s: float
    timeout_s: float
    memory_bytes: int
    stack_bytes: int


def main() -> None:
    asker = Asker(int(sys.argv[1]), float(sys.argv[2]))
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        asked = json.loads(_command(asker))
        limits = Limits(**asked["limits"])
        tokens = [token.encode("latin-1") for token in asked["tokens"]]
        table = TokenTable(tokens, frozenset(asked["skipped"]))
        grammars = Grammars(lambda: table, vocab_size=len(tokens), eos_token_ids=asked["eos_token_ids"])
        grammars.load()
        asker.answer(DONE)
        while True:
            asked = json.loads(_command(asker))
            kind = GrammarKind(asked["kind"])
            grammar = Grammar(kind, asked["text"], opens_objects=asked["opens_objects"])
            asker.answer(*_tried(grammars, grammar, limits))
    except (EOFError, OSError):  # the service has ended
        os._exit(0)


def _command(asker: Asker) -> bytes:
    command = asker.command()
    assert command is not None
    return command


def _tried(grammars: Grammars, grammar: Grammar, limits: Limits) -> tuple[int, bytes]:
    """Tries a grammar in a forked process, and returns the answer."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _try(grammars, grammar, limits, writing)
    os.close(writing)
    with open(reading, "rb") as file:
        answer = file.read()
    _, status = os.waitpid(pid, 0)
    if answer and status == 0:
        return answer[0], answer[1:]
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended_by == signal.SIGALRM:
        return LATE, f"the machine did not compile it within {limits.timeout_s:g} s".encode()
    if ended_by == signal.SIGPROF:
        return FAILED, f"takes more than {limits.cpu_s:g} s of the processor to compile".encode()
    return FAILED, _TOO_LARGE.encode()


def _try(grammars: Grammars, grammar: Grammar, limits: Limits, writing: int) -> NoReturn:
    """Compiles a grammar under the limits, writes the answer, and ends this process. A limit may end it before."""
    answers: list[bytes] = []
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a crash of the library is told to the client, not to the log
        for number in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
        signal.setitimer(signal.ITIMER_REAL, limits.timeout_s)
        limit_own_memory(limits.memory_bytes)
        threading.stack_size(limits.stack_bytes)
        thread = threading.Thread(target=lambda: answers.append(_answer(grammars, grammar)))
        try:
            thread.start()
            thread.join()
        except RuntimeError as error:
            answers.append(bytes([LATE]) + str(error).encode())
        os.write(writing, answers[0])
        os._exit(0)
    finally:
        os._exit(1)


def _answer(grammars: Grammars, grammar: Grammar) -> bytes:
    _, resident = own_bytes()
    try:
        grammars.matcher(grammar)
    except GrammarRefused as error:
        return bytes([FAILED]) + peer_text(str(error)).encode()
    except MemoryError:
        return bytes([FAILED]) + _TOO_LARGE.encode()
    return bytes([DONE]) + str(own_bytes()[1] - resident).encode()


if __name__ == "__main__":
    main()
