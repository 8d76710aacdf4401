"""Turns grammars into matchers for one tokenizer, with the library llguidance.

    Grammar ──compile──▶ prototype, cached by text ──copy──▶ Matcher of one output, or of its answer after the reasoning

llguidance computes masks while an output goes on, so compiling takes little time, and its limits bound the work at each
token.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, unquote

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from common.grammar.grammar import MAX_CHARS, SCHEMA_OPTIONS, Grammar, GrammarKind, whitespace_fault
from common.grammar.matcher import Mask, Matcher, allows, forbid
from common.grammar.reasoning import Reasoning
from common.grammar.reasoning_matcher import MarkerRefused, MarkerTokens, ReasoningMatcher, TokenTexts
from common.text.ebnf import EbnfRefused, ebnf_to_lark
from common.text.json_objects import (
    KINDS,
    SAID_OF_VALUES,
    Part,
    Place,
    References,
    close_objects,
    inside,
    moves_references,
    name_types,
    schemas_in,
)
from common.text.json_patterns import DATE_PATTERNS, PatternRefused, has_unwritable, writable_pattern

_MAX_CACHED = 256
MAX_CACHED_BYTES = 2 << 30
_MAX_CACHED_MARKERS = 16
"""The tables of a reasoning marker take 20 KiB for each of its bytes, with a vocabulary of 150,000 tokens."""
_MAX_MULTIPLE = 10_000
"""The largest `multipleOf`: llguidance's time for one grows with it, and no limit of its own bounds that."""
_MAX_OPTIONAL = 500
"""The most keys of an object without required keys. The library follows 2,000 alternatives at a time, four per key, so
no output could go on after the opening bracket of a larger object.
"""
_MAX_STATES = 50_000
LEXER_BYTES = _MAX_STATES * 1024
"""The most states of the lexer that a prototype and its copies share, which grows while outputs go on.

A state takes 400 to 800 bytes. Strings with a `maxLength` need five for each character.
"""
_LIMITS = LLParserLimits(
    max_grammar_size=50_000, step_max_items=10_000, max_lexer_states=_MAX_STATES, verbose_errors=False
)
_CALL_CPU_S, _MAX_OWED_CPU_S = 0.0005, 0.05
"""The processor time that each call of a matcher may take, and by how much all calls of a matcher and its copies may
exceed that in sum, in seconds.

The library's own limits are for one call, and an ambiguous grammar stays below them with 30 ms at each token. Calls of
usual grammars take 0.02 ms, single ones 2.4 ms. On a busy machine, calls of one output exceed what they may by 2 ms.
"""
_MAX_COUNTED_CPU_S = 0.0025
"""The most processor time of one call that counts. Where memory is short, a call may take seconds while the system
looks for memory. So one slow call says little about its grammar. A slow grammar has many.
"""
_MAX_SLOW_CALLS = 100
"""How many calls of a matcher and its copies may exceed `_MAX_COUNTED_CPU_S`, however fast other calls are."""
_JSON_OPTIONS: Any = {
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": 'nrbtf\\"',  # no \u: it would spell a declared key as another one
    "json_allow_general_unicode_escapes": False,
}
_JSON = json.JSONDecoder()
_ANYTHING: Sequence[Any] = (True, {})
"""Schemas that everything fits."""
_IDLE_VALUES: Mapping[str, Sequence[Any]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (*_ANYTHING, {"type": "string"}),
    "unevaluatedItems": _ANYTHING,
}
"""Values with which a keyword constrains nothing."""
_DEPENDENT: Mapping[str, Sequence[Any]] = {
    "dependentRequired": ([],),
    "dependentSchemas": _ANYTHING,
    "dependencies": (*_ANYTHING, []),
}
"""Values by name with which such a keyword constrains nothing."""
_SCHEMA_KEYWORDS = frozenset({"items", "additionalItems", "additionalProperties"})
_LIST_KEYWORDS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAME_KEYWORDS = frozenset({"properties", "patternProperties"})
"""Keywords that the library follows into a schema, a list of schemas, or schemas by name."""
_NEVER_EMPTY = ("anyOf", "oneOf", "type", "enum")
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_NUMERIC = _BOUNDS | {
    *("multipleOf", "minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains"),
    *("minProperties", "maxProperties"),
}
"""Keywords whose numbers say something about an output."""
_COUNTS = _NUMERIC - _BOUNDS - {"multipleOf"}
_MOST = 2**63
_NEARLY_MOST = 2**63 - 1024
"""llguidance reads numbers as doubles, and bounds of integers as 64 bits; it accepts no range from -_MOST. The largest
double below _MOST is _NEARLY_MOST.
"""
_FAR = 10**18
"""From here on, llguidance needs an end of the range on the far side too."""
_NO_FAR_END = "is too far from zero without a bound beyond it"
_EXCLUSIVE = (
    ("exclusiveMinimum", "minimum", math.inf, max),
    ("exclusiveMaximum", "maximum", -math.inf, min),
)
"""For each exclusive bound its inclusive one, where allowed numbers are, and what makes one bound out of two."""
_TOO_LARGE = "is at or beyond the ends of 64 bits"
_KEPT_IN_REFERENCES = "#/%!$&'()*+,;=:@?-._~"
_NOWHERE = re.compile("(?:Pointer|Anchor|Failed to parse array index '.*' in pointer) '(.*)'")
_EMPTY = re.compile("Unsatisfiable schema: Regex is empty.*")
"""Matches words that go on with a regular expression of the library's own."""
_ELSEWHERE = re.compile("Resource '(?:json-schema:///)?(.*)' is not present in a registry")
_BAD_REGEX = re.compile(
    r'(?:invalid regex ".*" \(in regex\): )?regex parse error:\n(?: {4}(.*)\n {4}( *)\^+|(?s:.*))\nerror: (.*)'
)
"""Matches words with a regular expression of one line and spaces up to the place in it, or of more, and the fault."""
_LOOK_AROUND = re.compile(r'(?:invalid regex ".*" \(in regex\): )?lookarounds not supported yet; (Word)?.*')
_NO_TOKEN = re.compile('unknown special token: "(.*?)"; following.*')
_ODD_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_PLAIN_REFERENCE = re.compile(r"(#(/(\$defs|definitions|properties)/[^/%]*)*)?")
"""Matches a `$ref` that cannot lead into a value that is no schema, such as that of `const`."""
_LARK_PART = re.compile(
    r'"(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|[^"\\\x00-\x1f\x7f])*"|/(?:\\.|[^/\\])+/|(?:#|//)[^\n]*|<[^<>\s]+>'
    r"|%(json|llguidance|regex)[ \t\r\n]*"
)
"""Matches strings, regular expressions, comments and token names in a Lark grammar, in which a keyword does not count,
and the keywords that JSON follows.
"""
AnyT = TypeVar("AnyT")
_IN_LARK = "failed to compile JSON schema: "
_OWN_WORDS = (
    ("oneOf constraints", ("oneOf",), "its branches may overlap, which is not supported; anyOf is"),
    ("min/maxProperties", ("maxProperties", "minProperties"), "is not supported with keys that may be left out"),
)
"""How the library's words begin that name no place, the keywords that they are about, and ours."""
_INCOMPATIBLE = "Unsatisfiable schema: incompatible types"
_NO_VALUE = ("Unsatisfiable schema: ", "no text that can be written")
"""How words begin that say that no value fits a schema."""
_MAX_TRIED_CHARS = 8 * MAX_CHARS[GrammarKind.JSON_SCHEMA]
"""How many characters of a refused schema's parts are compiled again, to find the part that is refused."""
_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats that the library knows."""
_MAX_SHOWN_CHARS = 64
_MAX_PATH_CHARS = 200
_LISTING = re.compile(r"^(?: *[0-9]+ \| .*| *\^+ *|<non-verbose/>)$", re.MULTILINE)
"""Matches the lines of the library's messages that repeat the grammar, point into it, or say that nothing follows."""
_PLACE = re.compile(r"at [0-9]+\([0-9]+\): ")
_MAX_FORCED_CHARS = 256
"""How many characters of a text that a grammar forces are encoded. A mask needs the first token only, drafts a few."""
_LEXER_ERROR = "lexer error"
"""How the library's message begins if the lexer that copies share has reached a limit."""
_BEFORE_FORCED = "\n"
"""A text that tokenizers do not join with the text after it. A space that they put before a text comes before this."""


class GrammarRefused(Exception):
    """The grammar is malformed, uses something unsupported, or is too large. The message says why."""


class _KeywordRefused(Exception):
    """A keyword of a schema is not supported. The message says why."""

    def __init__(self, keyword: str, why: str) -> None:
        super().__init__(why)
        self.keyword = keyword


class ReasoningRefused(Exception):
    """The model's tokens cannot spell the end marker of the reasoning."""


class OutputRefused(Exception):
    """Output that a request brings along does not fit its grammar, or its reasoning is too long."""


class TokenSpelling(Protocol):
    """The part of a tokenizer that grammars need. `TextTokenizer` describes the methods."""

    def bytes_of(self, token_id: int) -> bytes: ...

    def is_skipped(self, token_id: int) -> bool: ...

    def encode(self, text: str, *, adds_special_tokens: bool) -> tuple[int, ...]: ...


class Work:
    """Adds up by how much calls of a matcher and its copies exceeded `_CALL_CPU_S` of processor time.

    Shorter calls reduce the sum. One call counts for at most `_MAX_COUNTED_CPU_S`; longer calls are also counted
    themselves.

    Use it as a context manager around each call. `clock` returns the calling thread's processor time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._began_s = 0.0
        self._owed_s = 0.0
        self._num_slow = 0

    def __enter__(self) -> None:
        self._began_s = self._clock()

    def __exit__(self, *_: object) -> None:
        took_s = self._clock() - self._began_s
        if took_s > _MAX_COUNTED_CPU_S:
            took_s = _MAX_COUNTED_CPU_S
            self._num_slow += 1
        self._owed_s = max(0.0, self._owed_s + took_s - _CALL_CPU_S)

    @property
    def is_too_much(self) -> bool:
        return self._owed_s > _MAX_OWED_CPU_S or self._num_slow > _MAX_SLOW_CALLS


Vocabulary = dict[str, list[str] | list[int]]


@dataclass(slots=True)
class SharedLexer:
    """The state of the lexer that a prototype and its copies share. `failure` is the reason why the lexer can no longer
    be used, or "".

    If one matcher takes the lexer to a limit, the library reports that to this matcher only. From then on, other
    matchers refuse tokens that they allowed before, and report nothing.
    """

    failure: str = ""


class LlgMatcher:
    """A Matcher that uses llguidance. It fails if its calls take so long that they delay the steps of all requests (see
    `_CALL_CPU_S`).
    """

    def __init__(
        self, matcher: LLMatcher, end_ids: frozenset[int], work: Work, lexer: SharedLexer, *, names_tokens: bool = False
    ) -> None:
        """`names_tokens` says whether the grammar may name end tokens."""
        self._matcher = matcher
        self._end_ids = end_ids
        self._work = work
        self._lexer = lexer
        self._names_tokens = names_tokens
        self._has_refused = False
        self._is_at_end = False

    def accept(self, token_id: int) -> bool:
        # The library takes an end token in some states only.
        if token_id in self._end_ids or self._work.is_too_much:
            return False
        with self._work:
            is_accepted = self._matcher.try_consume_tokens([token_id]) == 1
        self._note_error()
        self._has_refused |= not is_accepted
        return is_accepted

    @property
    def failure(self) -> str:
        if self._work.is_too_much:
            return "its masks take too long"
        if self._matcher.is_error():
            return _words(self._matcher)
        if self._is_at_end:
            return "a token that ends the output stands before the end of the grammar"
        return self._lexer.failure if self._has_refused else ""

    def copy(self) -> LlgMatcher:
        matcher = self._matcher.deep_copy()
        return LlgMatcher(matcher, self._end_ids, self._work, self._lexer, names_tokens=self._names_tokens)

    def fill(self, mask: Mask) -> None:
        if not self._work.is_too_much:
            with self._work:
                self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                if self._names_tokens:
                    self._forbid_early_end(mask)
            self._note_error()
        if self._work.is_too_much or self._matcher.is_error():  # else the mask would let the output end
            mask[:] = 0

    def forced(self) -> Sequence[int]:
        if self._work.is_too_much:
            return ()
        with self._work:
            token_ids: list[int] = self._matcher.compute_ff_tokens()
        self._note_error()
        return token_ids

    def _forbid_early_end(self, mask: Mask) -> None:
        """Removes from the mask end tokens that the grammar names before its end."""
        named = [end_id for end_id in self._end_ids if allows(mask, end_id)]
        if not named or self._matcher.is_accepting():
            return
        for end_id in named:
            after = self._matcher.deep_copy()
            if not (after.consume_token(end_id) and after.is_accepting()):
                forbid(mask, (end_id,))
        self._is_at_end = not mask.any()

    def _note_error(self) -> None:
        """Tells the other matchers of the grammar if the lexer has failed."""
        if self._matcher.is_error() and (words := _words(self._matcher)).startswith(_LEXER_ERROR):
            self._lexer.failure = words


class _Vocabulary:
    """The tokenizer in the form that llguidance reads. llguidance calls it to encode a text that a grammar forces, and
    then allows only these tokens.
    """

    def __init__(self, tokenizer: TokenSpelling, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.tokens = [tokenizer.bytes_of(token_id) for token_id in range(vocab_size)]
        # An id without a token must not be among them: its empty name would be a beginning of every special token.
        self.special_token_ids = [each for each, part in enumerate(self.tokens) if part and tokenizer.is_skipped(each)]
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None
        self.bos_token_id = None
        self._tokenizer = tokenizer
        special = {*self.special_token_ids, *eos_token_ids}
        self._parts = {each: part for each, part in enumerate(self.tokens) if part and each not in special}
        self._ids = {part: each for each, part in self._parts.items()}
        self._longest = max(map(len, self._ids), default=0)

    @cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.tokens)

    def __call__(self, text: str) -> list[int]:
        """Returns tokens whose joined bytes are exactly the first `_MAX_FORCED_CHARS` characters of `text`, or none if
        there are no such tokens; llguidance then gives up.

        It tries several ways, because many tokenizers put a space before a text, and some encode the name of a special
        token as that token.
        """
        text = text[:_MAX_FORCED_CHARS]
        encoded = text.encode()
        for before in ("", _BEFORE_FORCED):
            ids = self._tokenizer.encode(before + text, adds_special_tokens=False)
            if (found := self._end_of(ids, encoded)) is not None:
                return found
        return self._longest_parts(encoded)

    def spell(self, text: bytes) -> list[int]:
        """Returns tokens whose joined bytes are exactly `text`, or none if there are no such tokens. The name of a
        special token is encoded as that token.
        """
        try:
            decoded = text.decode()
        except UnicodeDecodeError:  # a part of a character
            return self._longest_parts(text)
        ids = list(self._tokenizer.encode(decoded, adds_special_tokens=False))
        is_spelled = all(each < len(self.tokens) for each in ids) and b"".join(self.tokens[i] for i in ids) == text
        return ids if is_spelled else self(decoded)

    def _end_of(self, ids: Sequence[int], text: bytes) -> list[int] | None:
        """Returns the tokens at the end of `ids` whose joined bytes are exactly `text`, or None if there are none."""
        place, left = len(ids), len(text)
        while left > 0 and place > 0:
            place -= 1
            part = self._parts.get(ids[place])
            if part is None or not text.endswith(part, 0, left):
                return None
            left -= len(part)
        return list(ids[place:]) if left == 0 else None

    def _longest_parts(self, text: bytes) -> list[int]:
        ids, place = [], 0
        while place < len(text):
            for end in range(min(len(text), place + self._longest), place, -1):
                if (token_id := self._ids.get(text[place:end])) is not None:
                    break
            else:
                return []
            ids.append(token_id)
            place = end
        return ids


@dataclass(frozen=True, slots=True)
class _SchemaOptions:
    """The value of the keyword SCHEMA_OPTIONS: the regular expression of the spaces between parts of the JSON, and
    whether there may be any.
    """

    whitespace_pattern: str = r"[ \n\r\t]{1,4}"  # bounded: else a model may write spaces for ever
    whitespace_flexible: bool = True


@dataclass(frozen=True, slots=True)
class _Prototype:
    matcher: LLMatcher
    num_bytes: int
    lexer: SharedLexer = field(default_factory=SharedLexer)


class Grammars:
    """Compiles grammars for one model. Any thread may use it. It is slow, so do not use it on an event loop.

    `tokenizer` is called at the first use: services whose requests have no grammars never need the vocabulary.
    `on_found` is called for each grammar that is found in the cache, and `on_compiled` after each compilation, with its
    seconds.
    """

    def __init__(
        self,
        tokenizer: Callable[[], TokenSpelling],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        on_found: Callable[[], None] = lambda: None,
        on_compiled: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self._new_tokenizer = tokenizer
        self._on_found = on_found
        self._on_compiled = on_compiled
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._tokenizer: LLTokenizer | None = None
        self._marker_tokens: OrderedDict[Reasoning, MarkerTokens] = OrderedDict()
        self._prototypes: OrderedDict[Grammar, _Prototype] = OrderedDict()
        self._num_bytes = 0

    def __contains__(self, grammar: Grammar) -> bool:
        """Returns whether the grammar is compiled and in the cache."""
        return grammar in self._prototypes

    def num_bytes_of(self, grammar: Grammar) -> int | None:
        """Returns the `num_bytes` for which the grammar counts in the cache, or None if it is not there."""
        found = self._prototypes.get(grammar)
        return None if found is None else found.num_bytes

    def knows(self, reasoning: Reasoning) -> bool:
        """Returns whether the tables for these markers are in the cache."""
        return replace(reasoning, max_tokens=None) in self._marker_tokens

    def matcher(
        self,
        grammar: Grammar | None,
        output_ids: Sequence[int] = (),
        reasoning: Reasoning | None = None,
        *,
        num_bytes: int = 0,
    ) -> Matcher:
        """Returns a matcher that has accepted `output_ids`. Either of `grammar` and `reasoning` may be None.

        The most recently used grammars stay in the cache. Against its limit this one counts `num_bytes`, and the size
        to which its lexer may grow. Raises GrammarRefused, ReasoningRefused or OutputRefused.
        """
        matcher = self._new_matcher(grammar, reasoning, num_bytes)
        for place, token_id in enumerate(output_ids):
            if not matcher.accept(token_id):
                if matcher.failure:
                    raise GrammarRefused(f"is too large or too ambiguous for the output so far: {matcher.failure}")
                what = "the grammar" if reasoning is None else "the grammar or the limit on reasoning"
                raise OutputRefused(f"{what} forbids token {token_id} at index {place}")
        return matcher

    def vocabulary(self) -> Vocabulary:
        """Returns the vocabulary in a form for JSON: `tokens`, whose bytes are written as Latin-1 characters,
        `skipped`, which are the ids of special tokens, and `eos_token_ids`.

        Raises GrammarRefused for a model without end tokens, for which no grammar is served.
        """
        self._check_end_tokens()
        with self._lock:
            vocabulary = self._open_vocabulary()
        return {
            "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
            "skipped": vocabulary.special_token_ids,
            "eos_token_ids": self._eos_token_ids,
        }

    def load(self) -> None:
        """Prepares the library for compiling, so that the first grammar need not wait for it. Raises GrammarRefused."""
        with self._lock:
            self._open_tokenizer()

    def _new_matcher(self, grammar: Grammar | None, reasoning: Reasoning | None, num_bytes: int) -> Matcher:
        end_ids = frozenset(self._eos_token_ids)
        answer: LlgMatcher | None = None
        if grammar is not None:
            matcher, lexer = self._sound_copy(grammar, num_bytes)
            names_tokens = grammar.kind is GrammarKind.LARK and "<" in grammar.text
            answer = LlgMatcher(matcher, end_ids, Work(), lexer, names_tokens=names_tokens)
        if answer is not None and (reasoning is None or not reasoning.may_begin):
            return answer
        assert reasoning is not None, "nothing constrains the output"
        return ReasoningMatcher(self._tokens_of_markers(reasoning), reasoning, answer, end_ids)

    def _tokens_of_markers(self, reasoning: Reasoning) -> MarkerTokens:
        key = replace(reasoning, max_tokens=None)
        with self._lock:
            if (found := self._marker_tokens.get(key)) is not None:
                self._marker_tokens.move_to_end(key)
                return found
            vocabulary = self._open_vocabulary()
        try:
            made = MarkerTokens(reasoning, vocabulary.texts, vocabulary.spell)
        except MarkerRefused as error:
            raise ReasoningRefused("the model has no tokens for this text") from error
        with self._lock:
            self._marker_tokens[key] = made
            if len(self._marker_tokens) > _MAX_CACHED_MARKERS:
                self._marker_tokens.popitem(last=False)
        return made

    def _open_vocabulary(self) -> _Vocabulary:
        """Returns the vocabulary, which the first call reads. Must be called with the lock held."""
        if self._vocabulary is None:
            self._vocabulary = _Vocabulary(self._new_tokenizer(), self._vocab_size, self._eos_token_ids)
        return self._vocabulary

    def _open_tokenizer(self) -> LLTokenizer:
        """Returns the library's form of the vocabulary. Must be called with the lock held. Raises GrammarRefused."""
        if self._tokenizer is None:
            self._check_end_tokens()
            self._tokenizer = LLTokenizer(
                TokenizerWrapper(self._open_vocabulary()), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
        return self._tokenizer

    def _check_end_tokens(self) -> None:
        if not self._eos_token_ids:
            raise GrammarRefused("the model has no token that ends an output")

    def _sound_copy(self, grammar: Grammar, num_bytes: int) -> tuple[LLMatcher, SharedLexer]:
        """Returns a new matcher of a grammar, able to make its first mask, and the matcher's lexer. Raises
        GrammarRefused.

        All copies of a prototype share one lexer, which grows. If an output took it to its limit, the grammar is
        compiled again, so that later outputs do not fail.
        """
        for _ in range(2):
            prototype = self._prototype(grammar, num_bytes)
            matcher = prototype.matcher.deep_copy()
            matcher.compute_bitmask()
            if not (matcher.is_error() or prototype.lexer.failure):
                return matcher, prototype.lexer
            with self._lock:
                num_bytes = self._drop(grammar) or num_bytes
        raise GrammarRefused(_words(matcher) or prototype.lexer.failure)

    def _prototype(self, grammar: Grammar, num_bytes: int) -> _Prototype:
        with self._lock:
            if (found := self._prototypes.get(grammar)) is not None:
                self._prototypes.move_to_end(grammar)
                self._on_found()
                return found
            tokenizer = self._open_tokenizer()
        start_s = time.perf_counter()
        try:
            matcher = _compiled(grammar, tokenizer)
        finally:
            self._on_compiled(time.perf_counter() - start_s)
        prototype = _Prototype(matcher, num_bytes)
        with self._lock:
            self._drop(grammar)
            self._prototypes[grammar] = prototype
            self._num_bytes += num_bytes + LEXER_BYTES
            while len(self._prototypes) > _MAX_CACHED or self._num_bytes > MAX_CACHED_BYTES:
                self._drop(next(iter(self._prototypes)))
        return prototype

    def _drop(self, grammar: Grammar) -> int:
        """Removes a grammar from the cache, and returns the `num_bytes` for which it counted there, or 0."""
        dropped = self._prototypes.pop(grammar, None)
        if dropped is None:
            return 0
        self._num_bytes -= dropped.num_bytes + LEXER_BYTES
        return dropped.num_bytes


def _compiled(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    if not grammar.text:
        raise GrammarRefused("is empty")
    if grammar.kind is not GrammarKind.LARK:
        _check_length(len(grammar.text), grammar.kind)
    schemas: list[tuple[str, dict[str, Any]]] = []
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            schema, options = _checked_schema(grammar.text, opens_objects=grammar.opens_objects)
            schemas.append(("", schema))
            try:
                text = LLMatcher.grammar_from_json_schema(schema, overrides=options)
            except ValueError as error:  # of text that is not Unicode: half of a surrogate pair
                raise GrammarRefused(str(error)) from error
        case GrammarKind.REGEX:
            text = LLMatcher.grammar_from_regex(_with_ascii_classes(grammar.text))
        case GrammarKind.LARK:
            checked, schemas = _checked_lark(grammar.text, opens_objects=grammar.opens_objects)
            text = LLMatcher.grammar_from_lark(checked)
        case GrammarKind.CHOICE:
            text = LLMatcher.grammar_from_lark(_choice_as_lark(grammar.choices))
        case GrammarKind.EBNF:
            try:
                text = LLMatcher.grammar_from_lark(ebnf_to_lark(grammar.text))
            except EbnfRefused as error:
                raise GrammarRefused(str(error)) from error
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        place, words = _own_words(matcher.get_error())
        for where, each in schemas:
            if fault := _fault_in(each, words):
                raise GrammarRefused(where + fault)
        raise GrammarRefused(place + words if grammar.kind is GrammarKind.LARK else words)
    if warnings := matcher.get_grammar_warnings():
        raise GrammarRefused("; ".join(warnings))  # of keywords that would be ignored
    return matcher


def _words(matcher: LLMatcher) -> str:
    """Returns the error of a matcher on one line, with its place."""
    return "".join(_own_words(matcher.get_error()))


def _own_words(error: str) -> tuple[str, str]:
    """Returns the place that an error of the library begins with, `at LINE(COLUMN): ` in the text in Lark, or "", and
    the rest on one line, in our words if they are clearer.
    """
    place = found[0] if (found := _PLACE.match(error)) else ""
    error = error.removeprefix(place).removeprefix(_IN_LARK)
    if missing := _NOWHERE.match(error):  # only the beginning is the library's own
        return place, f"$ref: #{unquote(missing[1])} leads nowhere"
    if other := _ELSEWHERE.match(error):
        return place, f"$ref or $schema: {other[1]} is another document, which is not read"
    error = _BAD_REGEX.sub(_said_of_regex, error)
    words = " ".join(_LISTING.sub("", error).split())
    if words == "NoExtensionBias":
        return place, "no text matches it"
    words = _LOOK_AROUND.sub(_said_of_look_around, words)
    words = _NO_TOKEN.sub(r"the model has no special token \1", words)
    return place, _EMPTY.sub("no text that can be written fits its keywords", words)


def _said_of_regex(found: re.Match[str]) -> str:
    if found[1] is None:
        return found[3]
    rest = found[1][len(found[2]) :][:_MAX_SHOWN_CHARS]
    return f"{found[3]}, at {rest or 'its end'}"


def _said_of_look_around(found: re.Match[str]) -> str:
    return r"\b and other borders of words are not supported" if found[1] else "^ and $ are supported only at its ends"


def _choice_as_lark(texts: Sequence[str]) -> str:
    if not texts:
        raise GrammarRefused("has no text")
    if not all(texts):
        raise GrammarRefused("a text is empty")
    return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, texts))}"


def _with_ascii_classes(regex: str) -> str:
    """Returns a regular expression whose \\d and \\w are those of JSON schemas: they match ASCII characters only."""
    with_ascii: str = regex_to_lark(regex, use_ascii="dw")
    return with_ascii


def _checked_schema(text: str, *, opens_objects: bool) -> tuple[dict[str, Any], Any]:
    """Parses a JSON schema, and returns it with the library's options for it.

    Raises GrammarRefused if llguidance would take too long for it, or not keep to it.
    """
    try:
        schema = json.loads(text)
    except RecursionError as error:
        raise GrammarRefused("nests too deeply") from error
    except ValueError as error:
        raise GrammarRefused(f"is not JSON: {error}") from error
    return _check_schema(schema, opens_objects=opens_objects)


def _check_schema(schema: Any, *, opens_objects: bool) -> tuple[dict[str, Any], Any]:
    if not isinstance(schema, dict):
        raise GrammarRefused("is not a JSON object")
    options = _options(schema.pop(SCHEMA_OPTIONS, {}))
    _check_is_json(schema)
    has_odd_reference = any(_has_odd_reference(part) for _, part in schemas_in(schema))
    schemas, values = [], []
    for place, part in schemas_in(schema):
        _make_counts_whole(part)
        if not has_odd_reference:  # else a reference may lead to what is left out
            _leave_out_idle_keywords(part)  # before the walk goes into them
        schemas.append((place, part))
    if has_odd_reference:
        known = {id(part) for _, part in schemas}
        values = [(place, part) for place, part in _objects_in(schema) if id(part) not in known]
    for place, part in schemas:
        _check(place, part, _check_keywords, _make_writable)
        if not has_odd_reference:
            for keyword in SAID_OF_VALUES:
                part.pop(keyword, None)
    for place, part in values:
        _check(place, part, _check_keywords, _check_has_no_pattern)
    name_types(schema, [part for _, part in schemas])
    if keyword := _endless_keyword(schema, [part for _, part in (*schemas, *values)]):
        raise GrammarRefused(f"{keyword}: leads to itself without end, so no text matches it")
    if not opens_objects:
        close_objects(schema, [part for _, part in schemas])
    return schema, options


def _options(asked: Any) -> Any:
    """Returns the library's options for a schema with these SCHEMA_OPTIONS."""
    try:
        given = _SchemaOptions(**asked)
    except TypeError:
        names = " and ".join(each.name for each in fields(_SchemaOptions))
        raise GrammarRefused(f"{SCHEMA_OPTIONS}: is an object that may have {names}") from None
    pattern, flexible = given.whitespace_pattern, given.whitespace_flexible
    if [type(pattern), type(flexible)] != [str, bool]:
        raise GrammarRefused(f"{SCHEMA_OPTIONS}: has a value of a wrong type")
    pattern = pattern.replace(r"\s", r"[ \n\r\t]")
    if fault := whitespace_fault(pattern) or _why_refused({"type": "string", "pattern": pattern}):
        raise GrammarRefused(f"{SCHEMA_OPTIONS}.whitespace_pattern: {fault}")
    whitespace = {"whitespace_pattern": pattern} if flexible else {"whitespace_flexible": False}
    return {**_JSON_OPTIONS, **whitespace}


def _check(place: Place, part: dict[str, Any], *checks: Callable[[dict[str, Any]], None]) -> None:
    """Applies checks that raise _KeywordRefused. Raises GrammarRefused, with the place of the keyword in the schema."""
    try:
        for check in checks:
            check(part)
    except _KeywordRefused as error:
        raise GrammarRefused(f"{_path((place, error.keyword))}: {error}") from error


def _check_is_json(schema: dict[str, Any]) -> None:
    """Raises GrammarRefused for a number that JSON lacks, wherever it is."""
    waiting: list[tuple[Place, Any]] = [(None, schema)]
    while waiting:
        place, part = waiting.pop()
        if isinstance(part, float) and not math.isfinite(part):
            raise GrammarRefused(f"{_path(place)}: is a number that JSON lacks, or larger than any double")
        if isinstance(part, dict | list):
            waiting += inside(place, part)


def _check_keywords(part: dict[str, Any]) -> None:
    if SCHEMA_OPTIONS in part:
        raise _KeywordRefused(SCHEMA_OPTIONS, "is for a whole schema only")
    for keyword, value in part.items():
        if keyword in ("const", "enum"):
            for number in _leaves(value, int, float):
                _check_number(keyword, number)
        elif keyword in _NUMERIC and isinstance(value, int | float):
            _check_number(keyword, value, is_bound=keyword in _BOUNDS)
        elif keyword not in SAID_OF_VALUES and isinstance(value, int) and abs(value) >= _MOST:
            _check_number(keyword, value)
    multiple = part.get("multipleOf")
    if isinstance(multiple, int | float) and not 0 < multiple <= _MAX_MULTIPLE:
        raise _KeywordRefused("multipleOf", f"{multiple} is not in (0, {_MAX_MULTIPLE}]")
    if isinstance(part.get("minProperties"), int) and part["minProperties"] > 1:
        raise _KeywordRefused("minProperties", "more than 1 is not supported")  # it would count a repeated key twice
    properties = part.get("properties")
    if isinstance(properties, dict) and len(properties) > _MAX_OPTIONAL and not part.get("required"):
        why = f"has {len(properties)} keys, more than {_MAX_OPTIONAL}, and none of them is required"
        raise _KeywordRefused("properties", why)


def _check_number(keyword: str, number: Any, *, is_bound: bool = False) -> None:
    """Raises _KeywordRefused if the library would read another number."""
    if isinstance(number, int) and abs(number) < _MOST and number == int(float(number)):
        return
    if isinstance(number, int) and not (is_bound and (abs(number) >= _MOST or number == _MOST - 1)):
        why = "has more digits than a double holds" if abs(number) < _MOST else _TOO_LARGE
        raise _KeywordRefused(keyword, f"{number} {why}")


def _make_counts_whole(part: dict[str, Any]) -> None:
    """Makes 2 of 2.0, which the library refuses as a count."""
    for keyword in _COUNTS.intersection(part):
        if isinstance(number := part[keyword], float) and number.is_integer() and abs(number) < _MOST:
            part[keyword] = int(number)


def _leave_out_idle_keywords(part: dict[str, Any]) -> None:
    """Removes keywords that the library lacks where their value says nothing."""
    for keyword, idle in _IDLE_VALUES.items():
        if keyword in part and _is_any_of(part[keyword], idle):
            del part[keyword]
    for keyword, idle in _DEPENDENT.items():
        by_name = part.get(keyword)
        if isinstance(by_name, dict) and all(_is_any_of(each, idle) for each in by_name.values()):
            del part[keyword]
    if "unevaluatedProperties" in part and _is_any_of(part["unevaluatedProperties"], _ANYTHING):
        del part["unevaluatedProperties"]
        part.setdefault("additionalProperties", True)  # such an object is open
    if all(_is_any_of(part.get(each, True), _ANYTHING) for each in ("then", "else")):
        part.pop("if", None)
    if "if" not in part:
        part.pop("then", None)
        part.pop("else", None)
    properties, least, most = part.get("properties", {}), part.get("minProperties"), part.get("maxProperties")
    required = part.get("required")
    if type(least) is int and isinstance(required, list) and 0 <= least <= len({*map(str, required)}):
        del part["minProperties"]
    is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
    if type(most) is int and is_closed and isinstance(properties, dict) and len(properties) <= most:
        del part["maxProperties"]
    if part.get("minContains") == 0 and "maxContains" not in part:
        part.pop("contains", None)
    if "contains" not in part:
        part.pop("minContains", None)
        part.pop("maxContains", None)


def _is_any_of(value: Any, values: Sequence[Any]) -> bool:
    """Returns whether the JSON value is one of `values`; 1 is not true."""
    return any(type(value) is type(each) and value == each for each in values)


def _make_writable(part: dict[str, Any]) -> None:
    """Rewrites a schema: its patterns, and those of dates and times, then match only strings that our grammars can
    write, and the library accepts its bounds of integers and its references.

    Raises _KeywordRefused if a `const` or an `enum` has another string, and for a bound that cannot be kept.
    """
    for keyword in ("const", "enum"):
        if any(map(has_unwritable, _leaves(part.get(keyword), str))):
            raise _KeywordRefused(keyword, "has a control character without a short escape")
    kinds = part.get("type")
    is_integer = "integer" in kinds and "number" not in kinds if isinstance(kinds, list) else kinds == "integer"
    for keyword in _BOUNDS.intersection(part):
        part[keyword] = _bound(keyword, part[keyword], is_integer=is_integer)
    if is_integer:
        _make_inclusive(part)
        _add_far_end(part)
    if isinstance(reference := part.get("$ref"), str):
        document, mark, fragment = reference.partition("#")
        reference = document + mark + fragment.replace("#", "%23")
        try:  # names such as Response[int]
            part["$ref"] = quote(_ODD_PERCENT.sub("%25", reference), safe=_KEPT_IN_REFERENCES)
        except UnicodeEncodeError:
            raise _KeywordRefused("$ref", "is not Unicode") from None
    if isinstance(pattern := part.get("pattern"), str):
        part["pattern"] = _writable(pattern, "pattern")
    if isinstance(by_pattern := part.get("patternProperties"), dict):
        writable = {_writable(name, "patternProperties"): value for name, value in by_pattern.items()}
        if len(writable) < len(by_pattern):
            raise _KeywordRefused("patternProperties", "two of its patterns are the same")
        part["patternProperties"] = writable
    name, others = part.get("format"), part.get("allOf", [])
    if isinstance(name, str) and name in DATE_PATTERNS and isinstance(others, list):
        part["allOf"] = [*others, {"pattern": DATE_PATTERNS[name]}]


def _make_inclusive(part: dict[str, Any]) -> None:
    """Turns exclusive bounds from 2**53 on into inclusive ones, which are the next doubles. llguidance adds 1 to an
    exclusive bound of integers, as a double.
    """
    for exclusive, inclusive, beyond, inner_of in _EXCLUSIVE:
        bound = part.get(exclusive)
        if not isinstance(bound, int | float) or abs(bound) < 2**53:
            continue
        inner = int(math.nextafter(bound, beyond))
        if abs(inner) >= _MOST:
            raise _KeywordRefused(exclusive, f"{bound} {_TOO_LARGE}")
        del part[exclusive]
        other = part.get(inclusive)
        part[inclusive] = inner_of(inner, other) if isinstance(other, int | float) else inner


def _add_far_end(part: dict[str, Any]) -> None:
    """Ends a range of integers that begins far from zero at the end of 64 bits, if the schema does not end it."""
    low, high = part.get("minimum"), part.get("maximum")
    if isinstance(low, int | float) and low >= _FAR:
        part.setdefault("maximum", _MOST - 1)
    if isinstance(high, int | float) and high <= -_FAR:
        part.setdefault("minimum", -_NEARLY_MOST)


def _bound(keyword: str, bound: Any, *, is_integer: bool) -> Any:
    if not isinstance(bound, int | float) or abs(bound) < _MOST - 1:
        return bound
    is_low = keyword in ("minimum", "exclusiveMinimum")
    if is_integer and is_low and bound < 0:
        return -_NEARLY_MOST
    if is_integer and not is_low and bound > 0:
        return _MOST - 1
    raise _KeywordRefused(keyword, f"{bound} {_TOO_LARGE}")


def _writable(pattern: str, keyword: str) -> str:
    try:
        return writable_pattern(pattern)
    except PatternRefused as error:
        raise _KeywordRefused(keyword, str(error)) from error


def _check_has_no_pattern(value: dict[str, Any]) -> None:
    why = "is not supported in a value where a $ref may lead to values"
    if isinstance(value.get("pattern"), str):
        raise _KeywordRefused("pattern", why)
    if "patternProperties" in value:
        raise _KeywordRefused("patternProperties", why)
    if isinstance(name := value.get("format"), str) and name in DATE_PATTERNS:
        raise _KeywordRefused("format", why)


def _checked_lark(text: str, *, opens_objects: bool) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Returns the Lark grammar with our options added to each JSON schema in it, and these schemas, each with its place
    as errors begin with it. Raises GrammarRefused.
    """
    parts: list[str] = []
    schemas: list[tuple[str, dict[str, Any]]] = []
    done = place = num_schema_chars = 0
    while (found := _LARK_PART.search(text, place)) is not None:
        place = found.end()
        if found[1] is None:
            if found[0].startswith("/") and not found[0].startswith("//"):
                parts += (text[done : found.start() + 1], _with_ascii_classes(found[0][1:-1]), "/")
                done = place
            continue
        try:
            value, place = _JSON.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise GrammarRefused(f"%{found[1]}: is not JSON: {error}") from error
        if found[1] == "json":
            _check_length(place - found.end(), GrammarKind.JSON_SCHEMA)
            num_schema_chars += place - found.end()
            where = f"{_place_of(text, found.start())}: "
            try:
                schema, options = _check_schema(value, opens_objects=opens_objects)
            except GrammarRefused as error:
                raise GrammarRefused(f"{where}{error}") from error
            schemas.append((where, schema))
            parts += (text[done : found.start()], "%json ", json.dumps({**schema, SCHEMA_OPTIONS: options}))
            done = place
    _check_length(len(text) - num_schema_chars, GrammarKind.LARK)
    return "".join([*parts, text[done:]]), schemas


def _place_of(text: str, index: int) -> str:
    """Returns the place of a character as the library writes it."""
    return f"at {text.count(chr(10), 0, index) + 1}({index - text.rfind(chr(10), 0, index)})"


def _check_length(num_chars: int, kind: GrammarKind) -> None:
    if num_chars > (most := MAX_CHARS[kind]):
        raise GrammarRefused(f"has {num_chars} characters, more than {most}")


def _fault_in(schema: dict[str, Any], words: str) -> str:
    """Returns what is wrong in a schema that the library refuses with `words`, after its place, or "" if that is not
    found in a little time.

    Looks at the schemas that the library reads, those behind references included.
    """
    references = References(schema)
    waiting: list[tuple[Place, Any]] = [(None, schema)]
    known: set[int] = set()
    definitions: dict[str, Any] = {
        keyword: schema[keyword] for keyword in ("$defs", "definitions") if keyword in schema
    }
    innermost = ""  # the last part so far that is refused in the same words
    num_tried_chars = 0

    def why_part_refused(part: dict[str, Any]) -> str:
        nonlocal num_tried_chars
        tried = {**definitions, **part}
        num_tried_chars += len(json.dumps(tried))
        return _why_refused(tried)

    while waiting and num_tried_chars < _MAX_TRIED_CHARS:
        place, part = waiting.pop()
        if isinstance(part, bool) or id(part) in known:
            continue
        if not isinstance(part, dict):
            return f"{_path(place)}: is not an object, true or false"
        known.add(id(part))
        try:
            _check_alone(part, words)
        except _KeywordRefused as error:
            return f"{_path((place, error.keyword))}: {error}"
        if words.startswith(_NO_VALUE):
            if not (why := why_part_refused(part)).startswith(_NO_VALUE):
                continue  # what is in it is no reason
            innermost = f"{_path(place)}: {_no_value(part, why)}".removeprefix(": ")
        for begin, keywords, why in _OWN_WORDS:
            named = [keyword for keyword in keywords if keyword in part and words.startswith(begin)]
            if named and why_part_refused(part).startswith(begin):
                innermost = f"{_path((place, named[0]))}: {why}"
        for keyword, value in part.items():
            inner = (place, keyword)
            if (
                keyword in _LIST_KEYWORDS
                or keyword in _NAME_KEYWORDS
                or (keyword == "items" and isinstance(value, list))
            ):
                waiting += inside(inner, value)
            elif keyword in _SCHEMA_KEYWORDS:
                waiting.append((inner, value))
            elif keyword == "$ref" and (found := references.found(value)) is not None:
                waiting.append(found)
    return innermost if not waiting or words.startswith(_NO_VALUE) else ""  # an outer part has no other fault


def _no_value(part: dict[str, Any], words: str) -> str:
    """Returns why no value fits a schema that the library refuses with `words`, which begin as `_NO_VALUE` says."""
    if words.startswith(_INCOMPATIBLE):
        return f"no value fits {' and '.join(keyword for keyword in KINDS if keyword in part)}"
    return words.replace(_NO_VALUE[0], "no value fits it: ")


def _check_alone(part: dict[str, Any], words: str) -> None:
    """Raises _KeywordRefused for a keyword that the library refuses wherever it is, or for one that it refuses in some
    places if its `words` are about such a one.
    """
    for keyword in _NEVER_EMPTY:
        if "is empty" in words and part.get(keyword) == []:
            raise _KeywordRefused(keyword, "is empty")
    for keyword in part:
        if words.startswith("Unimplemented keys") and json.dumps(keyword) in words:
            raise _KeywordRefused(keyword, "is not supported")
    for keyword, fits, what in _FORMS:
        if keyword in part and not fits(value := part[keyword]):
            raise _KeywordRefused(keyword, f"{_shown(value)} {what}".lstrip())
    if words.startswith("Unknown format") and part.get("format", _FORMATS[0]) not in _FORMATS:
        raise _KeywordRefused("format", f"{_shown(part['format'])} is none of {', '.join(_FORMATS)}".lstrip())
    for keyword in ("$ref", "$schema"):
        if (
            words.startswith("$ref")
            and keyword in part
            and words[:_MAX_PATH_CHARS] == _why_refused({keyword: part[keyword]})
        ):
            raise _KeywordRefused(keyword, words.partition(": ")[2])
    for keyword in sorted(_NUMERIC.intersection(part)):
        number = part[keyword]
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise _KeywordRefused(keyword, "is not a number")
        if keyword in _COUNTS and not (isinstance(number, int) and number >= 0):
            raise _KeywordRefused(keyword, f"{number} is not a whole number from 0 on")
    for keywords, kind, what in ((_LIST_KEYWORDS, list, "a list"), (_NAME_KEYWORDS, dict, "an object")):
        for keyword in keywords.intersection(part):
            if not isinstance(part[keyword], kind):
                raise _KeywordRefused(keyword, f"is not {what}")
    if isinstance(pattern := part.get("pattern"), str) and (why := _why_refused({"pattern": pattern})):
        raise _KeywordRefused("pattern", why)
    for name in part.get("patternProperties", ()):
        if why := _why_refused({"pattern": name}):
            raise _KeywordRefused("patternProperties", why)
    multiple = part.get("multipleOf")
    if isinstance(multiple, float) and _why_refused({"type": "number", "multipleOf": multiple}):
        raise _KeywordRefused("multipleOf", f"{multiple} has too many digits")
    bounds = {keyword: part[keyword] for keyword in sorted(_BOUNDS) if type(part.get(keyword)) in (int, float)}
    if bounds and part.get("type") != "integer" and _why_refused({"type": "number", **bounds}):
        for keyword, bound in bounds.items():
            if _why_refused({"type": "number", keyword: bound}):
                why = "is too near to zero" if abs(bound) < 1 else _NO_FAR_END
                raise _KeywordRefused(keyword, f"{bound} {why}")


def _endless_keyword(schema: dict[str, Any], parts: Sequence[dict[str, Any]]) -> str:
    """Returns a keyword of `schema` that only endless values fit, or "" if none is found. `parts` are the schema and
    all schemas in it.

    Finds none if a schema inside has references of its own, which `References` does not find.
    """
    if moves_references(schema):
        return ""
    references = References(schema)
    endless: dict[int, dict[int, str]] = {id(part): {} for part in parts}  # keywords of groups without a finite member
    users: dict[int, list[tuple[int, int]]] = {}
    for part in parts:
        for number, (keyword, group) in enumerate(_needed(part, references)):
            if all(id(each) in endless for each in group):
                endless[id(part)][number] = keyword
                for each in group:
                    users.setdefault(id(each), []).append((id(part), number))
    finite = [key for key, groups in endless.items() if not groups]
    while finite:
        for key, number in users.get(finite.pop(), ()):
            if endless[key].pop(number, "") and not endless[key]:
                finite.append(key)
    return next(iter(endless[id(schema)].values()), "")


def _needed(part: dict[str, Any], references: References) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yields groups of schemas, each with its keyword. A value that fits `part` fits a schema of each group, or has a
    value inside that does.
    """

    def listed(keyword: str) -> list[Any]:
        return value if isinstance(value := part.get(keyword), list) else []

    yield "$ref", [references.referred(part.get("$ref"))]
    yield from (("allOf", [each]) for each in listed("allOf"))
    yield from ((keyword, listed(keyword)) for keyword in ("anyOf", "oneOf") if listed(keyword))
    properties, least = part.get("properties"), part.get("minItems")
    if part.get("type") in ("object", ["object"]) and isinstance(properties, dict):
        yield from (("required", [properties.get(name)]) for name in listed("required") if isinstance(name, str))
    if part.get("type") in ("array", ["array"]) and isinstance(least, int):
        items = [*listed("prefixItems"), part.get("items")]
        yield from (("minItems", [each]) for each in items[: max(0, least)])


def _shown(value: Any) -> str:
    """Returns a wrong value as JSON, or "" if that is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_SHOWN_CHARS else ""


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_types(value: Any) -> bool:
    return all(each in _TYPES for each in (value if isinstance(value, list) else [value]))


_FORMS: Sequence[tuple[str, Callable[[Any], bool], str]] = (
    ("type", _are_types, f"is none of {', '.join(_TYPES)}, nor a list of them"),
    ("enum", lambda value: isinstance(value, list), "is not a list"),
    ("required", _are_texts, "is not a list of texts"),
    *((keyword, _is_text, "is not a text") for keyword in ("pattern", "format", "$ref")),
)
"""Keywords, what their values must be, and what is said of others."""


def _why_refused(schema: dict[str, Any]) -> str:
    """Returns why the library refuses this schema, or "" if it does not."""
    try:
        words: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS))
    except ValueError as error:  # of text that is not Unicode
        words = str(error)
    return _own_words(words)[1][:_MAX_PATH_CHARS]


def _has_odd_reference(schema: dict[str, Any]) -> bool:
    """Returns whether a `$ref` of the schema may lead into a value, such as that of `const`, and not to a schema."""
    reference = schema.get("$ref")
    return isinstance(reference, str) and not _PLAIN_REFERENCE.fullmatch(reference)


def _leaves(value: Any, *kinds: type[AnyT]) -> Iterator[AnyT]:
    """Yields the values of these kinds in a JSON value, without objects' names and booleans."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, kinds) and not isinstance(part, bool):
            yield part
        elif isinstance(part, dict):
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _objects_in(value: Any) -> Iterator[Part]:
    """Yields all objects in a JSON value, itself included."""
    waiting: list[tuple[Place, Any]] = [(None, value)]
    while waiting:
        place, part = waiting.pop()
        if isinstance(part, dict):
            yield place, part
        if isinstance(part, dict | list):
            waiting += inside(place, part)


def _path(place: Place) -> str:
    """Returns a place as the names that lead to it, such as `properties.a.anyOf.0`; only the end of a long one."""
    names = list[str]()
    while place is not None:
        place, name = place
        names.append(name)
    path = ".".join(reversed(names))
    return path if len(path) <= _MAX_PATH_CHARS else "..." + path[-_MAX_PATH_CHARS:]
