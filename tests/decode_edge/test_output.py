from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from common.sampling.params import TokenLogprobs
from common.text.tokenizer import TextTokenizer, TokenDecoder
from decode_service.edge.text.detokenizer import MAX_TOGETHER
from decode_service.edge.text.output import OutputProcessor, StopMatch
from tests.decode_edge.tokenizers_for_tests import (
    WORDS,
    byte_fallback,
    byte_level,
    eos_id,
    ids_of,
    ids_of_pieces,
    metaspace,
    vocab_size,
    word_pieces,
)

TOKENIZERS = {
    "byte_level": byte_level(),
    "byte_fallback": byte_fallback(),
    "metaspace": metaspace(),
    "word_pieces": word_pieces(),
}
BYTES = TOKENIZERS["byte_level"]
REPLACEMENT_PIECE = max(i for i in range(300) if TOKENIZERS["byte_fallback"].decode([i]) == "\ufffd")
STOP_TEXTS = ("a", "ab", "abc", "bc", " a", "é", "€", "stop", "end", "\n\n", "aé", "b€a", "opst", "cab", "a<eos>")


def every_tokenizer() -> st.SearchStrategy[TextTokenizer]:
    return st.sampled_from(list(TOKENIZERS.values()))


def likely_token_ids(tokenizer: TextTokenizer) -> st.SearchStrategy[list[int]]:
    """Draws token ids: mostly words, special tokens and the bytes of a few characters, and sometimes any byte."""
    size = vocab_size(tokenizer)
    some_bytes = sorted(set("ab c€é😀\n".encode())) if size > 256 else []
    likely = some_bytes + list(range(256 if size > 256 else 0, size))
    return st.lists(st.sampled_from(likely) | st.integers(0, size - 1), max_size=24)


def appended(tokenizer: TokenDecoder, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
    """Returns the text that `token_ids` add after the prompt: both are decoded together, and the prompt's own text is
    removed.
    """
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *token_ids])
    num_shared = next((n for n, (ours, theirs) in enumerate(zip(whole, before, strict=False)) if ours != theirs), None)
    return whole[min(len(before), len(whole)) if num_shared is None else num_shared :]


def reference(
    tokenizer: TokenDecoder,
    prompt: Sequence[int],
    token_ids: Sequence[int],
    stops: Sequence[str],
    min_tokens: int,
    includes_stop: bool,
) -> tuple[int, str, str | None]:
    """Returns the expected (number of ids, text, stop string). They are computed by decoding everything again after
    every token.
    """

    def visible(num: int) -> str:
        return appended(tokenizer, prompt, token_ids[:num]).rstrip("\ufffd")

    exempt = len(visible(min_tokens))
    for num in range(min_tokens + 1, len(token_ids) + 1):
        text = visible(num)
        found = [
            (start + len(stop), start, stop)
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > exempt
        ]
        if found:
            _, start, stop = min(found)
            return num, text[: start + len(stop) * includes_stop], stop
    return len(token_ids), appended(tokenizer, prompt, token_ids), None


@given(st.data())
def test_joined_texts_are_what_the_ids_append_however_the_tokens_cut_the_characters(data: st.DataObject) -> None:
    tokenizer = data.draw(every_tokenizer())
    prompt, token_ids = data.draw(likely_token_ids(tokenizer)), data.draw(likely_token_ids(tokenizer))
    decoder = data.draw(st.sampled_from([tokenizer, tokenizer.showing(None), tokenizer.showing(["<pad>"])]))
    output = OutputProcessor(decoder=decoder, prompt_token_ids=prompt)

    texts = [output.push([token_id]).text for token_id in token_ids] + [output.finish()]

    assert "".join(texts) == appended(decoder, prompt, token_ids)


PARTS = (0xE2, 0xF0, 0x9F, 0xFF, *range(256 + len(WORDS), 256 + len(WORDS) + 4))


@given(st.lists(st.sampled_from(PARTS), min_size=30, max_size=200))
def test_joined_texts_are_the_decoded_ids_where_hardly_a_character_is_whole(token_ids: list[int]) -> None:
    output = OutputProcessor(decoder=BYTES)

    texts = [output.push([token_id]).text for token_id in token_ids] + [output.finish()]

    assert "".join(texts) == BYTES.decode(token_ids)


@given(st.data())
def test_output_ends_at_the_first_stop_string_however_the_tokens_cut_it(data: st.DataObject) -> None:
    tokenizer = data.draw(every_tokenizer())
    prompt, token_ids = data.draw(likely_token_ids(tokenizer)), data.draw(likely_token_ids(tokenizer))
    stops = data.draw(st.lists(st.sampled_from(STOP_TEXTS), min_size=1, max_size=3, unique=True))
    min_tokens, includes_stop = data.draw(st.integers(0, 6)), data.draw(st.booleans())
    decoder = data.draw(st.sampled_from([tokenizer, tokenizer.showing(None), tokenizer.showing(["<pad>"])]))
    output = OutputProcessor(
        decoder=decoder,
        prompt_token_ids=prompt,
        stop_strings=stops,
        min_tokens=min_tokens,
        includes_stop=includes_stop,
    )

    pieces = [output.push([token_id]) for token_id in token_ids]
    text = "".join(piece.text for piece in pieces) + output.finish()

    num_ids, expected_text, stop = reference(decoder, prompt, token_ids, stops, min_tokens, includes_stop)
    assert (sum(len(piece.token_ids) for piece in pieces), text) == (num_ids, expected_text)
    assert (output.match.stop_string if output.match else None) == stop


@given(st.data())
def test_text_is_the_same_however_many_tokens_come_at_once(data: st.DataObject) -> None:
    tokenizer = data.draw(every_tokenizer())
    prompt, token_ids = data.draw(likely_token_ids(tokenizer)), data.draw(likely_token_ids(tokenizer))
    token_ids = token_ids * data.draw(st.integers(1, 3))  # more than are decoded together
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=4)))
    options = {
        "decoder": data.draw(st.sampled_from([tokenizer, tokenizer.showing(None)])),
        "prompt_token_ids": prompt,
        "end_token_ids": frozenset(data.draw(st.lists(st.sampled_from(range(vocab_size(tokenizer))), max_size=2))),
        "min_tokens": data.draw(st.integers(0, 6)),
    }
    by_one, together = OutputProcessor(**options), OutputProcessor(**options)

    one = "".join(by_one.push([token_id]).text for token_id in token_ids) + by_one.finish()
    pieces = [together.push(token_ids[start:stop]) for start, stop in zip([0, *cuts], [*cuts, None], strict=True)]

    assert "".join(piece.text for piece in pieces) + together.finish() == one
    assert [each for piece in pieces for each in piece.token_ids] == token_ids
    assert together.num_output_tokens == len(token_ids)


@given(st.data())
def test_a_resumed_stream_continues_where_the_first_one_was_cut(data: st.DataObject) -> None:
    tokenizer = data.draw(every_tokenizer())
    prompt, token_ids = data.draw(likely_token_ids(tokenizer)), data.draw(likely_token_ids(tokenizer))
    num_delivered = data.draw(st.integers(0, len(token_ids)))
    stops = data.draw(st.lists(st.sampled_from(["ab", "bc", "abcab", "a", "€", "d stop"]), max_size=3))
    min_tokens = data.draw(st.integers(0, 4))
    whole = OutputProcessor(decoder=tokenizer, prompt_token_ids=prompt, stop_strings=stops, min_tokens=min_tokens)
    before = whole.push(token_ids[:num_delivered])

    resumed = OutputProcessor(
        decoder=tokenizer,
        prompt_token_ids=prompt,
        stop_strings=stops,
        min_tokens=min_tokens,
        generated_token_ids=before.token_ids,
    )
    after = resumed.push(token_ids[num_delivered:])

    expected = whole.push(token_ids[num_delivered:])
    assert (after, resumed.finish(), resumed.match) == (expected, whole.finish(), whole.match)
    assert resumed.num_output_tokens == whole.num_output_tokens


FALLBACK = TOKENIZERS["byte_fallback"]


@pytest.mark.parametrize(
    ("name", "prompt", "output", "text"),
    [
        ("byte_fallback", ["a"], ["▁ab"], " ab"),
        ("byte_fallback", ["a", "<eos>"], ["▁ab"], " ab"),
        ("byte_fallback", ["<eos>"], ["▁ab"], "ab"),
        ("byte_fallback", ["a", "<0x0A>"], ["▁", "▁", "▁", "▁ab"], "    ab"),
        ("byte_fallback", ["▁"], ["▁ab"], " ab"),
        ("byte_fallback", ["a", "<0x0A>"], ["<0x20>", "<0x20>", "b"], "  b"),
        ("byte_fallback", ["a", "<0xE2>", "<0x82>"], ["<0xAC>", "b"], "€b"),
        ("byte_fallback", ["<0xE2>", "<0x82>", "<0xAC>"] * 200, ["<0xE2>", "<0x82>", "<0xAC>"], "€"),
        ("byte_fallback", ["a", *["<eos>"] * 300], ["▁ab"], " ab"),
        ("byte_fallback", ["a", *["<eos>"] * 2000], ["▁ab"], "ab"),
        ("metaspace", ["a"], ["▁▁▁▁", "b"], "    b"),
        ("metaspace", ["▁"], ["▁x"], " x"),
        ("word_pieces", ["a"], ["b", "##c"], " bc"),
        ("word_pieces", ["a"], ["##c", "b"], "c b"),
    ],
)
def test_an_output_goes_on_where_the_prompt_ends(
    name: str, prompt: Sequence[str], output: Sequence[str], text: str
) -> None:
    tokenizer = TOKENIZERS[name]
    processor = OutputProcessor(
        decoder=tokenizer, prompt_token_ids=ids_of_pieces(tokenizer, prompt), stop_strings=["never"]
    )

    pieces = [
        processor.push([token_id], [TokenLogprobs(-1.0, (token_id,), (-1.0,))])
        for token_id in ids_of_pieces(tokenizer, output)
    ]

    assert "".join(piece.text for piece in pieces) + processor.finish() == text
    positions = [position for piece in pieces for position in piece.logprobs]
    assert text.encode().endswith(b"".join(position.token for position in positions))
    assert all(position.top_tokens == (position.token,) for position in positions)


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte_level", "byte_fallback"])
def test_a_character_is_sent_whole_and_as_soon_as_it_is_there(tokenizer: TextTokenizer) -> None:
    output = OutputProcessor(decoder=tokenizer)
    texts = [output.push([byte]).text for byte in "é😀".encode()]
    assert [text for text in texts if text] + [output.finish()] == ["é", "😀", ""] or tokenizer is FALLBACK
    assert all("\ufffd" not in text for text in texts)
    assert [OutputProcessor(decoder=BYTES).push(list("€".encode()[:num])).text for num in (1, 2, 3)] == ["", "", "€"]


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_cannot() -> None:
    output = OutputProcessor(decoder=BYTES, stop_strings=["stop"])

    assert [output.push([ord(char)]).text for char in "a sto"] == ["a", " ", "", "", ""]
    assert output.push([ord("y")]).text == "stoy"


def test_ids_and_logprobs_end_with_the_token_that_completes_the_stop_string() -> None:
    output = OutputProcessor(decoder=BYTES, stop_strings=["abc"])
    token_ids = [ord(char) for char in "xabcde"]
    logprobs = [TokenLogprobs(-float(index), (), ()) for index in range(6)]

    piece = output.push(token_ids, logprobs)

    assert piece.token_ids == tuple(token_ids[:4])
    assert [position.logprobs for position in piece.logprobs] == logprobs[:4]
    assert piece.text == "x"
    assert output.match == StopMatch("abc", num_output_tokens=4)


@pytest.mark.parametrize("stops", [[], ["never"]])
def test_an_ending_token_is_in_the_text_when_asked_for(stops: list[str]) -> None:
    end, eos = ids_of(BYTES, "end")[0], eos_id(BYTES)
    for decoder, token_id, includes_stop, text in (
        (BYTES, end, False, "a"),
        (BYTES, end, True, "aend"),
        (BYTES, eos, True, "a"),
        (BYTES.showing(None), eos, True, "a<eos>"),
    ):
        ends = {end, eos}
        output = OutputProcessor(decoder=decoder, stop_strings=stops, end_token_ids=ends, includes_stop=includes_stop)
        piece = output.push([ord("a"), token_id])
        assert piece.token_ids == (ord("a"), token_id)
        assert piece.text + output.finish() == text


def counting(tokenizer: TextTokenizer) -> tuple[TextTokenizer, list[int]]:
    """Returns a tokenizer, and a list to which each of its `decode` calls appends the number of ids it got."""
    decoded_lens: list[int] = []

    class Counting(TextTokenizer):
        def decode(self, token_ids: Sequence[int]) -> str:
            decoded_lens.append(len(token_ids))
            return super().decode(token_ids)

    tokenizer.__class__ = Counting
    return tokenizer, decoded_lens


@pytest.mark.parametrize("token_id", [eos_id(BYTES), vocab_size(BYTES) + 1], ids=["special", "past the vocabulary"])
def test_tokens_without_text_do_not_slow_the_next_token_down(token_id: int) -> None:
    """If EOS is ignored, a model may repeat it thousands of times. The ids that are decoded with the next token must
    not grow with that.
    """
    tokenizer, decoded_lens = counting(byte_level())
    output = OutputProcessor(decoder=tokenizer)

    output.push([token_id] * 500 + [ord("a")] * 500)

    assert max(decoded_lens) <= 2 * MAX_TOGETHER


@pytest.mark.parametrize(
    ("new_tokenizer", "token_ids"),
    [
        (byte_fallback, [*"€".encode()] * 1000),
        (byte_fallback, [0x80] * 3000),
        (byte_fallback, [*"€".encode()] * 500 + [0xFF] + [ord("a")] * 1500),
        (byte_level, [0x80] * 3000),
        (byte_fallback, [0x80, REPLACEMENT_PIECE] * 1500),
        (byte_level, [*b"\xe2\x82"] * 1500),
        (byte_level, [256 + len(WORDS) + 3] * 3000),
    ],
    ids=["characters", "never one", "spoilt", "level, never one", "replacement", "level, never complete", "straddling"],
)
def test_bytes_in_a_row_do_not_slow_each_other_down(
    new_tokenizer: Callable[[], TextTokenizer], token_ids: list[int]
) -> None:
    """A client that resumes a stream may bring any ids, for example thousands of byte tokens."""
    tokenizer, decoded_lens = counting(new_tokenizer())
    output = OutputProcessor(decoder=tokenizer, stop_strings=["stop"])

    text = output.push(token_ids).text + output.finish()

    assert text == new_tokenizer().decode(token_ids)
    assert sum(decoded_lens) < 40 * len(token_ids)


# ---- the bytes of tokens with log-probabilities ---------------------------------------------------------------------


def bytes_in(output: OutputProcessor, token_ids: Sequence[int], *, at_once: int = 1) -> list[bytes]:
    """Pushes `at_once` tokens at a time into the processor, and returns the bytes of each chosen token."""
    pieces = [token_ids[start : start + at_once] for start in range(0, len(token_ids), at_once)]
    return [
        position.token
        for piece in pieces
        for position in output.push(piece, [TokenLogprobs(-1.0, (), ())] * len(piece)).logprobs
    ]


@given(st.data())
def test_the_bytes_of_the_tokens_joined_are_the_text(data: st.DataObject) -> None:
    tokenizer = data.draw(every_tokenizer())
    prompt, token_ids = data.draw(likely_token_ids(tokenizer)), data.draw(likely_token_ids(tokenizer))
    output = OutputProcessor(decoder=tokenizer, prompt_token_ids=prompt)

    tokens = bytes_in(output, token_ids, at_once=data.draw(st.integers(1, 4)))

    joined = b"".join(
        token for token, token_id in zip(tokens, token_ids, strict=True) if not tokenizer.is_skipped(token_id)
    )
    text, before = appended(tokenizer, prompt, token_ids), tokenizer.decode(prompt)
    assume(not before.endswith("\ufffd"))  # the output may complete the first bytes of a character
    if tokenizer is BYTES:
        assert joined.decode(errors="replace") == text
    elif "\ufffd" not in text:  # a run of byte tokens that is not UTF-8 has no text of its own
        assert joined.decode() == text


def test_a_character_of_several_tokens_has_its_bytes_shared_among_them() -> None:
    half, byte = "€".encode()[:2], "€".encode()[2]
    token_id = next(i for i in range(256, vocab_size(BYTES)) if BYTES.bytes_of(i) == half)
    assert bytes_in(OutputProcessor(decoder=BYTES), [token_id, byte]) == [half, bytes([byte])]
    euro = list("€".encode())
    fallback = TOKENIZERS["byte_fallback"]
    assert bytes_in(OutputProcessor(decoder=fallback), euro) == [bytes([byte]) for byte in euro]


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK, TOKENIZERS["metaspace"]], ids=list(TOKENIZERS)[:3])
def test_tokens_that_are_no_text_have_their_names_and_ids_past_the_vocabulary_nothing(tokenizer: TextTokenizer) -> None:
    names = [tokenizer.bytes_of(token_id) for token_id in range(vocab_size(tokenizer))]
    assert names[-3:] == [b"<eos>", b"<pad>", b"<tool call>"]
    assert tokenizer.bytes_of(vocab_size(tokenizer)) == b""


def test_other_tokens_of_a_position_have_the_bytes_they_would_have_had_there() -> None:
    tokenizer = TOKENIZERS["byte_fallback"]
    word = next(i for i in range(256, vocab_size(tokenizer)) if tokenizer.bytes_of(i) == b" ab")
    output = OutputProcessor(decoder=tokenizer)
    logprobs = TokenLogprobs(-1.0, (word, 0xE2), (-0.5, -2.0))
    first, second = output.push([word, word], [logprobs] * 2).logprobs
    assert first.top_tokens == (b"ab", b"\xe2")
    assert second.top_tokens == (b" ab", b"\xe2")
