"""Compares what a schema's grammar accepts, and outputs drawn under it, with the library jsonschema."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from jsonschema import Draft202012Validator

from common.grammar.grammar import Grammar, GrammarKind
from common.grammar.matcher import Matcher
from common.text.grammars import GrammarRefused, Grammars
from common.text.tokenizer import TextTokenizer
from tests.grammars.walks import Walker


class SchemaChecks:
    """Checks schemas one by one. `counts` has the numbers of schemas `served` and `refused`, and of outputs drawn at
    random under their grammars: `ended` by themselves, `cut` at the length limit, or `failed` in the matcher.
    """

    def __init__(self, tokenizer: TextTokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.counts: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._grammars = Grammars(lambda: tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self._walker = Walker(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)

    def refusal(self, schema: Any) -> str:
        """Returns why the schema is refused, or "" if it is served."""
        try:
            self._matcher(schema)
        except GrammarRefused as error:
            self.counts["refused"] += 1
            return str(error) or "refused without a reason"
        self.counts["served"] += 1
        return ""

    def accepts(self, schema: Any, instance: Any) -> bool:
        """Returns whether the grammar allows the instance as a whole output, as json.dumps writes it."""
        matcher = self._matcher(schema)
        token_ids = self._tokenizer.encode(json.dumps(instance, ensure_ascii=False), adds_special_tokens=False)
        return all(map(matcher.accept, token_ids)) and self._walker.may_end(matcher)

    def wrong_outputs(self, schema: Any, *, num_walks: int, max_tokens: int) -> Iterator[str]:
        """Draws `num_walks` random outputs under the schema's grammar. Yields those that ended by themselves and do not
        fit the schema.
        """
        validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        draw = random.Random(0)
        for number in range(num_walks):
            is_hostile = number % 2 == 1
            walk = self._walker.walk(self._matcher(schema), draw, is_hostile=is_hostile, max_tokens=max_tokens)
            self.counts["failed" if walk.failure else "ended" if walk.is_complete else "cut"] += 1
            if walk.is_complete and (fault := _fault_of(walk.output, validator)):
                yield f"{walk.output!r}: {fault}"

    def _matcher(self, schema: Any) -> Matcher:
        return self._grammars.matcher(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))


def _fault_of(output: bytes, validator: Any) -> str:
    try:
        instance = json.loads(output.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return str(error)
    return next((error.message for error in validator.iter_errors(instance)), "")


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
