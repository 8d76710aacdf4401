"""The fuzz target for grammars: a client's grammar is compiled or refused in bounded time, and outputs follow it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.grammar.grammar import GrammarKind
from common.text.grammar_compiler import GrammarCompiler, GrammarTrials
from common.text.grammars import Grammars
from tests.decode_edge.tokenizers_for_tests import byte_level, eos_id, vocab_size
from tests.fuzz.pure_targets import assert_travels
from tests.fuzz.services import loop_under_watch
from tests.fuzz.target import Run, Target
from tests.grammars.hostile import decoded, encoded, hostile_grammar, is_list_of_texts
from tests.grammars.walks import Walker

MAX_TOKENS = 40
MASK_CPU_S = 0.25
"""The most processor time in seconds that accepting a token and computing the next mask may take."""


@contextmanager
def grammar() -> Iterator[Run]:
    """Yields the target for a grammar. An input is a byte for the grammar's kind, and its text."""
    tokenizer = byte_level()
    limits = {"vocab_size": vocab_size(tokenizer), "eos_token_ids": [eos_id(tokenizer)]}
    grammars = Grammars(lambda: tokenizer, **limits)
    walker = Walker(tokenizer, **limits)
    with loop_under_watch() as loop:
        trials = GrammarTrials(grammars.vocabulary)
        compiler = GrammarCompiler(grammars, trials.try_out)

        def run(data: bytes) -> None:
            grammar = decoded(data)
            if grammar.kind is GrammarKind.CHOICE and not is_list_of_texts(grammar.text):
                return  # the edge makes the list
            try:
                matcher = loop.run(compiler.matcher(grammar))
            except InvalidRequest as error:
                assert_travels(error)
            else:
                began_s = time.thread_time()
                walker.walk(matcher, random.Random(len(data)), is_hostile=True, max_tokens=MAX_TOKENS)
                assert time.thread_time() - began_s < MAX_TOKENS * MASK_CPU_S
            assert not loop.faults, loop.faults

        try:
            yield run
        finally:
            loop.run(compiler.__aexit__())
            loop.run(trials.__aexit__())


def _inputs(seeds: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    families = st.integers(0, 2**32).map(lambda seed: encoded(hostile_grammar(random.Random(seed))))
    texts = st.tuples(st.integers(0, 9), st.text(max_size=40)).map(lambda drawn: bytes(drawn[:1]) + drawn[1].encode())
    return families | families | st.sampled_from(seeds) | texts


GRAMMAR = Target(name="grammar", inputs=_inputs, open=grammar, is_pure=False)
