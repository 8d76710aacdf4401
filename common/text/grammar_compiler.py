"""Compiles grammars beside the event loop: a large one delays no other work than compiling."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from common.errors import InvalidRequest, Overloaded
from common.grammar.grammar import Grammar
from common.grammar.matcher import Matcher
from common.grammar.reasoning import Reasoning
from common.text.grammars import GrammarRefused, Grammars, OutputRefused, ReasoningRefused

_MAX_WAITING = 256
_RETRY_AFTER_S = 1
TIMEOUT_S = 10.0
_STACK_BYTES = 512 << 20
"""The library recurses for each definition that another one refers to. Memory is taken as far as the stack is used."""


class GrammarCompiler:
    """Makes matchers on a thread of its own. For the event loop only, inside a `with`."""

    def __init__(self, grammars: Grammars, *, timeout_s: float = TIMEOUT_S) -> None:
        """A caller waits for a grammar for `timeout_s` at most. What runs then goes on, and delays the next ones."""
        self._grammars = grammars
        self._timeout_s = timeout_s
        self._thread = _thread_with_stack(_STACK_BYTES)
        self._num_waiting = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    async def matcher(
        self, grammar: Grammar | None, output_ids: Sequence[int] = (), reasoning: Reasoning | None = None
    ) -> Matcher:
        """Returns a matcher that has accepted `output_ids`. Either of `grammar` and `reasoning` may be None.

        Raises InvalidRequest, naming the field, for a grammar that is not served or still compiles at the end of the
        wait, for a marker of reasoning that the model cannot write, and for output that does not fit; Overloaded if too
        many grammars wait, or one waits too long.
        """
        field = "sampling.reasoning" if grammar is None else grammar.request_field
        if self._num_waiting >= _MAX_WAITING:
            raise Overloaded(f"{self._num_waiting} grammars wait to be compiled", retry_after_s=_RETRY_AFTER_S)
        self._num_waiting += 1
        try:
            future = self._thread.submit(self._grammars.matcher, grammar, output_ids, reasoning)
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(future)
        except GrammarRefused as error:
            raise InvalidRequest(field, str(error)) from error
        except ReasoningRefused as error:
            raise InvalidRequest("sampling.reasoning.end", str(error)) from error
        except TimeoutError as error:
            if future.cancel():  # it has not begun
                message = f"grammars wait for more than {self._timeout_s:g} s to be compiled"
                raise Overloaded(message, retry_after_s=_RETRY_AFTER_S) from error
            message = f"takes longer than {self._timeout_s:g} s to compile"
            raise InvalidRequest(field, message) from error
        except OutputRefused as error:
            raise InvalidRequest("generated_token_ids", str(error)) from error
        finally:
            self._num_waiting -= 1


def _thread_with_stack(num_bytes: int) -> ThreadPoolExecutor:
    """Returns an executor with one thread, which is started now and has a stack of `num_bytes`."""
    before = threading.stack_size(num_bytes)
    try:
        executor = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        executor.submit(int).result()
    finally:
        threading.stack_size(before)
    return executor
