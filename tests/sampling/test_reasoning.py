"""Tests of reasoning before an answer: the text decides where the reasoning ends, and its matcher allows what the
definition in this file allows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.grammar.grammar import Grammar, GrammarKind
from common.grammar.matcher import Matcher, MinLength, allows, fill_nodes, num_words
from common.grammar.reasoning import Markers, OutputPart, Reasoning, ReasoningCount
from common.grammar.reasoning_matcher import MarkerRefused, MarkerTokens, ReasoningMatcher, TokenTexts
from common.text.grammars import Grammars, OutputRefused, ReasoningRefused
from common.text.tokenizer import TextTokenizer
from tests.decode_edge.tokenizers_for_tests import byte_level, eos_id, ids_of_pieces, vocab_size, with_space_mark

OPEN = Reasoning("", "bcb", is_open=True)
CLOSED = Reasoning("ab", "abab")
BYTES = byte_level()
VOCAB = vocab_size(BYTES)
EOS = eos_id(BYTES)
TOKENS = [BYTES.bytes_of(token_id) for token_id in range(VOCAB)]
GRAMMARS = Grammars(lambda: BYTES, vocab_size=VOCAB, eos_token_ids=[EOS])


def part_of(reasoning: Reasoning, text: bytes) -> tuple[OutputPart, bytes]:
    """Returns the part (reasoning, answer, ...) in which an output with this text is, and the text of its answer so
    far.
    """
    if not reasoning.is_open:
        stripped = text.lstrip()
        if not stripped.startswith(reasoning.start.encode()):
            is_begun = reasoning.start.encode().startswith(stripped)
            return (OutputPart.BEFORE, b"") if is_begun else (OutputPart.UNREASONED, text)
        text = stripped.removeprefix(reasoning.start.encode())
    _, end, answer = text.partition(reasoning.end.encode())
    return (OutputPart.ANSWER, answer) if end else (OutputPart.REASONING, b"")


texts = st.lists(st.sampled_from(["a", "b", "c", "ab", "bc", "abab", "bcb", "€", " ", "\n\n"]), max_size=9).map(
    lambda parts: "".join(parts).encode()
)


@given(texts, st.sampled_from([OPEN, CLOSED]), st.data())
def test_only_the_text_decides_which_part_it_is(text: bytes, reasoning: Reasoning, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    markers = Markers(reasoning)
    place, answer = markers.beginning, b""
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        place, num_answer = markers.after(place, text[start:stop])
        answer += text[start:stop][stop - start - num_answer :]
    part, expected = part_of(reasoning, text)
    assert place.part is part
    assert expected.endswith(answer) if part is OutputPart.UNREASONED else answer == expected
    assert reasoning.answer_in(text.decode()) == (text if part is OutputPart.BEFORE else expected).decode()


@given(st.lists(st.integers(0, VOCAB - 1), max_size=12), st.sampled_from([OPEN, CLOSED]))
def test_reasoning_tokens_are_those_up_to_its_end(token_ids: list[int], reasoning: Reasoning) -> None:
    count = ReasoningCount(reasoning, BYTES.bytes_of)
    expected = 0
    for number, token_id in enumerate(token_ids, start=1):
        before = part_of(reasoning, b"".join(TOKENS[each] for each in token_ids[: number - 1]))[0]
        after = part_of(reasoning, b"".join(TOKENS[each] for each in token_ids[:number]))[0]
        count.add(token_id)
        if before in (OutputPart.BEFORE, OutputPart.REASONING) and after in (OutputPart.REASONING, OutputPart.ANSWER):
            expected = number
        assert count.num_tokens == expected


def is_allowed(reasoning: Reasoning, has_grammar: bool, output: list[int], token_id: int) -> bool:
    """Returns whether the token may follow `output`, which has not reached its answer. This is the definition that
    matchers are compared with. With `has_grammar` the answer must match (b|c)+.
    """
    text = b"".join(TOKENS[each] for each in output)
    part, _ = part_of(reasoning, text)
    after, answer = part_of(reasoning, text + TOKENS[token_id])
    if part is OutputPart.REASONING and reasoning.max_tokens is not None and len(output) >= reasoning.max_tokens:
        end = reasoning.end.encode()
        begun = next(n for n in range(len(end) - 1, -1, -1) if text.endswith(end[:n]))
        return TOKENS[token_id] != b"" and end[begun:].startswith(TOKENS[token_id])  # only one of them is
    if not has_grammar:
        return (
            part is not OutputPart.BEFORE
            or reasoning.max_tokens != 0
            or after not in (OutputPart.REASONING, OutputPart.ANSWER)
        )
    if after is OutputPart.ANSWER and answer:
        return False
    if part is OutputPart.REASONING:
        return token_id != EOS
    is_answer = bool(TOKENS[token_id]) and set(text + TOKENS[token_id]) <= set(b"bc")
    return is_answer or token_id == reasoning.start.encode()[len(text)]  # the usual tokens of a text are its bytes


@pytest.mark.parametrize(
    ("reasoning", "max_tokens", "has_grammar"),
    [
        *[(OPEN, max_tokens, has_grammar) for max_tokens in (None, 0, 3) for has_grammar in (True, False)],
        *[(CLOSED, max_tokens, has_grammar) for max_tokens in (None, 3) for has_grammar in (True, False)],
        (CLOSED, 0, False),
    ],
)
def test_masks_and_matchers_allow_what_the_definition_allows(
    reasoning: Reasoning, max_tokens: int | None, has_grammar: bool
) -> None:
    reasoning = Reasoning(reasoning.start, reasoning.end, reasoning.is_open, max_tokens)
    grammar = Grammar(GrammarKind.REGEX, "[bc]+") if has_grammar else None
    likely = ids_of_pieces(BYTES, ["a", "b", "c", "ab", "bc", "abc"])
    mask = np.empty(num_words(VOCAB), np.int32)
    num_ended = 0
    for seed in range(25):
        draw, output = random.Random(seed), list[int]()
        matcher = GRAMMARS.matcher(grammar, (), reasoning)
        while part_of(reasoning, b"".join(TOKENS[each] for each in output))[0] in (
            OutputPart.BEFORE,
            OutputPart.REASONING,
        ):
            if len(output) == 12:
                break
            matcher.fill(mask)
            allowed = [each for each in range(VOCAB) if allows(mask, each)]
            expected = [each for each in range(VOCAB) if is_allowed(reasoning, has_grammar, output, each)]
            part, _ = part_of(reasoning, b"".join(TOKENS[each] for each in output))
            if part is OutputPart.REASONING and max_tokens is not None and len(output) >= max_tokens:
                assert len(allowed) == 1 and set(allowed) <= set(expected)
            else:
                assert allowed == expected, output
            accepted = [each for each in range(VOCAB) if matcher.copy().accept(each)]
            assert accepted == allowed
            output.append(draw.choice([each for each in allowed if each in likely] or allowed))
            assert matcher.accept(output[-1])
        num_ended += len(output) < 12
        if has_grammar and part_of(reasoning, b"".join(TOKENS[each] for each in output))[0] is OutputPart.ANSWER:
            matcher.fill(mask)
            assert {TOKENS[each] for each in range(VOCAB) if allows(mask, each)} == {b"b", b"c", b"bc"}
        assert_same_as_replayed(matcher, GRAMMARS.matcher(grammar, output, reasoning))
    assert num_ended > 5


def assert_same_as_replayed(matcher: Matcher, replayed: Matcher) -> None:
    masks = np.empty((2, num_words(VOCAB)), np.int32)
    matcher.fill(masks[0])
    replayed.fill(masks[1])
    assert masks[0].tolist() == masks[1].tolist()


def forced(matcher: Matcher, size: int) -> list[int]:
    """Returns the next tokens for as long as the matcher allows only one. At most `size` are returned."""
    token_ids, mask = list[int](), np.empty(num_words(size), np.int32)
    while True:
        matcher.fill(mask)
        allowed = [each for each in range(size) if allows(mask, each)]
        if len(allowed) > 1:
            return token_ids
        assert matcher.accept(allowed[0])
        token_ids += allowed


@pytest.mark.parametrize(
    ("new_tokenizer", "end", "brought", "expected"),
    [
        (byte_level, "<eos>", [], ["<eos>"]),
        (byte_level, "abc", [], ["a", "b", "c"]),
        (byte_level, "abc", ["ab"], ["c"]),
        (byte_level, "abc", ["a", "ab"], ["c"]),
        (byte_level, "b€", ["b", "âĤ"], ["¬"]),
        (with_space_mark, "ayes", [], ["a", "yes"]),
        (with_space_mark, "ayes", ["ay"], ["e", "s"]),
    ],
)
def test_a_limit_leads_to_the_end_marker_from_where_the_text_is(
    new_tokenizer: Callable[[], TextTokenizer], end: str, brought: list[str], expected: list[str]
) -> None:
    tokenizer = new_tokenizer()
    size = vocab_size(tokenizer)
    grammars = Grammars(lambda: tokenizer, vocab_size=size, eos_token_ids=[])
    reasoning = Reasoning("", end, is_open=True, max_tokens=len(brought))
    matcher = grammars.matcher(None, ids_of_pieces(tokenizer, brought), reasoning)
    assert list(matcher.forced()) == forced(matcher, size) == ids_of_pieces(tokenizer, expected)


def test_what_is_forced_goes_on_from_the_end_marker_into_the_answer() -> None:
    reasoning = Reasoning("", "ab", is_open=True, max_tokens=0)
    matcher = GRAMMARS.matcher(Grammar(GrammarKind.REGEX, "xyz(x|y)"), (), reasoning)
    assert list(matcher.forced()) == forced(matcher, VOCAB) == ids_of_pieces(BYTES, ["a", "b", "x", "y", "z"])
    assert not matcher.forced()


def test_output_with_too_much_reasoning_is_refused() -> None:
    a, b = ids_of_pieces(BYTES, ["a", "b"])
    limited = Reasoning("", "b", is_open=True, max_tokens=2)
    GRAMMARS.matcher(None, [a, a, b, a], limited)
    with pytest.raises(OutputRefused, match="the grammar or the limit on reasoning forbids token 97 at index 2"):
        GRAMMARS.matcher(None, [a, a, a], limited)


def test_a_marker_that_no_tokens_spell_is_refused() -> None:
    with pytest.raises(ReasoningRefused):
        Grammars(with_space_mark, vocab_size=40, eos_token_ids=[]).matcher(None, (), Reasoning("", "[", True, 1))


class Counted(bytes):
    """Bytes of a token that count how often they are looked at beside a marker."""

    num_looks = 0

    def __radd__(self, begun: bytes) -> bytes:
        Counted.num_looks += 1
        return begun + bytes(self)


@given(
    st.text("ab", min_size=1, max_size=6),
    st.text("ab", min_size=1, max_size=6),
    st.sets(st.text("ab ", max_size=8), min_size=1),
)
def test_the_tokens_that_complete_a_marker_are_found_among_all(start: str, end: str, texts: set[str]) -> None:
    tokens = [text.encode() for text in sorted(texts)]
    made = MarkerTokens(Reasoning(start, end, is_open=False), TokenTexts(tokens), lambda text: [0])
    for place, mask in made.past_end.items():
        after = [made.markers.after(place, each) for each in tokens]
        past = [to.part is OutputPart.ANSWER and num_answer > 0 for to, num_answer in after]
        assert [allows(mask, each) for each in range(len(tokens))] == past
        if place.part is OutputPart.BEFORE:
            completing = [to.part in (OutputPart.REASONING, OutputPart.ANSWER) for to, _ in after]
            assert [allows(made.completing[place], each) for each in range(len(tokens))] == completing


def test_a_long_marker_costs_little_more_than_a_short_one() -> None:
    """Clients choose markers. Tokens that complete none of the marker's places are not looked at, place by place."""
    tokens = [Counted(b"a%d" % number) for number in range(500)]
    MarkerTokens(Reasoning("", "a" * 32, is_open=True), TokenTexts(tokens), lambda text: [0])
    assert 500 <= Counted.num_looks <= 1000


def test_where_nothing_spells_the_rest_of_the_end_marker_it_comes_anew() -> None:
    tokens = [b"<", b"</t>", b"x"]
    made = MarkerTokens(
        Reasoning("", "</t>", is_open=True), TokenTexts(tokens), lambda text: [1] if text == b"</t>" else []
    )
    assert made.closing == {0: 1, 1: 1, 2: 1, 3: 1}


def test_an_end_marker_that_never_comes_forces_what_leads_back_to_the_same_place() -> None:
    tokens, usual = (
        [b"a", b"b", b"ab", b"bX", b"c"],
        {b"ababX": [2, 0, 3], b"babX": [1, 0, 3], b"abX": [0, 3], b"bX": [3]},
    )
    reasoning = Reasoning("", "ababX", is_open=True, max_tokens=2)
    made = MarkerTokens(reasoning, TokenTexts(tokens), lambda text: usual.get(text, []))
    matcher = ReasoningMatcher(made, reasoning, None, ())
    assert matcher.accept(2) and matcher.accept(2)  # the X that is left is no token
    assert matcher.forced() == [2]


def test_an_end_marker_is_refused_if_only_later_parts_of_it_can_be_spelled() -> None:
    with pytest.raises(MarkerRefused):
        MarkerTokens(Reasoning("", "<.", is_open=True), TokenTexts([b"."]), lambda text: [0] if text == b"." else [])


def test_a_token_that_goes_through_the_reasoning_into_the_answer_is_not_allowed_beside_a_grammar() -> None:
    a, b, abc = ids_of_pieces(BYTES, ["a", "b", "abc"])
    matcher = GRAMMARS.matcher(Grammar(GrammarKind.REGEX, "[abc]+"), (), Reasoning("a", "b"))
    mask = np.empty(num_words(VOCAB), np.int32)
    matcher.fill(mask)
    assert [allows(mask, each) for each in (a, b, abc)] == [True, True, False]
    assert not matcher.accept(abc) and matcher.accept(a) and matcher.accept(b)


def test_masks_of_drafts_around_the_reasoning_are_those_of_new_matchers() -> None:
    """Some paths of the draft tree are answers without reasoning, and others go through it."""
    grammar, reasoning = Grammar(GrammarKind.REGEX, "bcbc"), Reasoning("bb", "cc")
    letters, parents = "bcbccbb", [0, 1, 1, 3, 4, 5, 2]
    token_ids = ids_of_pieces(BYTES, letters)
    masks, expected = (np.empty((8, num_words(VOCAB)), np.int32) for _ in range(2))
    fill_nodes(GRAMMARS.matcher(grammar, (), reasoning), masks, MinLength(0, ()), token_ids, parents)
    for node in range(8):
        path, at = list[int](), node
        while at:
            path, at = [token_ids[at - 1], *path], parents[at - 1]
        GRAMMARS.matcher(grammar, path, reasoning).fill(expected[node])
    assert masks.tolist() == expected.tolist()


def test_the_vocabulary_is_searched_once_for_the_same_markers() -> None:
    class Counting(TextTokenizer):
        num_encoded = 0

        def encode(self, *args: Any, **options: Any) -> tuple[int, ...]:
            self.num_encoded += 1
            return BYTES.encode(*args, **options)

    tokenizer = Counting(BYTES._pretrained)
    grammars = Grammars(lambda: tokenizer, vocab_size=VOCAB, eos_token_ids=[EOS])
    grammars.matcher(None, (), Reasoning("<r>", "abc", is_open=False, max_tokens=2))
    num_encoded = tokenizer.num_encoded
    grammars.matcher(None, (), Reasoning("<r>", "abc", is_open=False, max_tokens=3))
    assert tokenizer.num_encoded == num_encoded > 0
