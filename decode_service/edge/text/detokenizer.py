"""Turns token ids into text, one token at a time, as a continuation of any earlier text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from common.text.tokenizer import TokenDecoder

_REPLACEMENT = "\ufffd"
_LONG_WINDOW = 32
MAX_TOGETHER = 16  # tokens; they are decoded once more, as the context of the next ones
_TRIED_CUTS = 4  # the most bytes of a character
_NUM_PROMPT_TOKENS = 8  # these have more text than a decoder strips at a text's start
_MAX_PROMPT_BYTE_RUN = 256
_MAX_LOOKED_AT = 1024


@dataclass(frozen=True, slots=True)
class DecodedText:
    """The text that a token adds.

    `text` is final. `tail` follows it if the output ends here, and a later token may still change `tail`.
    """

    text: str
    tail: str = ""


class IncrementalDetokenizer:
    """Detokenises output one token at a time, as the continuation of a prompt.

    The texts that all `push` calls and one final `flush` return, joined, are the output's text: `decode` of prompt and
    output together, without the beginning that it shares with `decode` of the prompt alone. Only the prompt's last
    tokens are decoded. A character that the prompt begins and the output completes belongs to the output.
    No returned text splits a character: bytes that may begin one are kept until it is complete, or until `flush`.

        ids    ... │ context: final │ pending │        decode(context + pending) minus decode(context) is the text
                   └────── window ────────────┘        of pending; earlier ids cannot change it
    """

    def __init__(self, decoder: TokenDecoder, prompt_token_ids: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._window: list[int] = []
        self._num_context = 0
        self._num_emitted_chars = 0  # length of the window's text
        self._run: _ByteRun | None = None  # the byte tokens at the end of the window
        self._cut_at_len = _LONG_WINDOW
        self._prompt_rest = ""  # the prompt's text after the emitted text, which may still change
        self._begin_after(_visible_end(decoder, prompt_token_ids))

    @property
    def begins_text(self) -> bool:
        """Whether neither prompt nor output has had any text yet."""
        return not self._window

    def push(self, token_id: int) -> DecodedText:
        if self._decoder.is_skipped(token_id):
            return DecodedText("")
        if (byte := self._decoder.byte_of.get(token_id)) is not None:
            return DecodedText("", tail=self._beyond_prompt(self._push_byte(token_id, byte)))
        return DecodedText(self._push_plain([token_id]))

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Adds several tokens and returns the final text, without a tail. This takes much less time than `push` for
        each token.
        """
        texts = []
        plain: list[int] = []
        for token_id in token_ids:
            if self._decoder.is_skipped(token_id):
                continue
            is_byte = token_id in self._decoder.byte_of
            if plain and (is_byte or len(plain) == MAX_TOGETHER):
                texts.append(self._push_plain(plain))
                plain = []
            if is_byte:
                self._push_byte(token_id, self._decoder.byte_of[token_id])
            else:
                plain.append(token_id)
        if plain:
            texts.append(self._push_plain(plain))
        return "".join(texts)

    def _push_plain(self, token_ids: Sequence[int]) -> str:
        """Adds tokens that are neither skipped nor byte tokens. Returns the text that becomes final."""
        self._run = None
        self._window += token_ids
        text = self._decoder.decode(self._window)
        is_complete = not text.endswith(_REPLACEMENT)
        num_final = len(text) if is_complete else len(text) - 1
        new = text[self._num_emitted_chars : num_final]
        if new and self._prompt_rest:
            new, self._prompt_rest = self._beyond_prompt(new), ""
        self._num_emitted_chars = max(self._num_emitted_chars, num_final)
        if is_complete:
            self._forget(self._window[self._num_context :])
        elif len(self._window) >= self._cut_at_len:
            self._cut(text)
            self._cut_at_len = len(self._window) + _LONG_WINDOW
        return new

    def flush(self) -> str:
        """Returns the rest of the output's text, which was held back because it was not final. Do not call `push`
        afterwards.
        """
        return self._beyond_prompt(self._kept_back())

    def _begin_after(self, prompt_token_ids: Sequence[int]) -> None:
        run_start = len(prompt_token_ids)
        while run_start and prompt_token_ids[run_start - 1] in self._decoder.byte_of:
            run_start -= 1
        self._window = list(prompt_token_ids[:run_start])
        text = self._decoder.decode(self._window)
        self._num_emitted_chars = len(text) - text.endswith(_REPLACEMENT)
        for token_id in prompt_token_ids[run_start:]:
            self._push_byte(token_id, self._decoder.byte_of[token_id])
        self._prompt_rest = self._kept_back()

    def _beyond_prompt(self, text: str) -> str:
        """Returns the part of `text` that belongs to the output and not to the prompt.

        `text` begins where the final text ends.
        """
        rest = self._prompt_rest
        while not text.startswith(rest):
            rest = rest[:-1]
        return text[len(rest) :]

    def _kept_back(self) -> str:
        return self._decoder.decode(self._window)[self._num_emitted_chars :]

    def _push_byte(self, token_id: int, byte: int) -> str:
        """Adds a byte-fallback token. Returns all text that follows the final text, and that is not final yet itself.

        A run of byte tokens becomes final when a token of another kind ends it. Until then the next byte may turn all
        of it into U+FFFD.
        """
        if self._run is None:
            self._run = _ByteRun(before=self._kept_back())
        self._window.append(token_id)
        if self._run.push(byte):
            self._run.align(self._kept_back())
        return self._run.text.rstrip(_REPLACEMENT)

    def _forget(self, recent: Sequence[int]) -> None:
        """Drops all ids from the window except `recent`, the context for the next ids.

        If `recent` alone decodes to no text, it drops nothing: the decoder may strip a space at the start of a text.
        """
        text = self._decoder.decode(recent)
        if text:
            self._window = list(recent)
            self._num_context = len(recent)
            self._num_emitted_chars = len(text)

    def _cut(self, text: str) -> None:
        """Drops all but the last few ids of a window that has grown long because its last character is incomplete.

        `text` is the window's text. The window is cut at a place near its end if the two parts, decoded separately,
        give `text` together: then no character is split. It is also cut there if the part that stays has a whole
        character before its last one, because then no earlier byte affects what follows. If there is no such place,
        nothing is dropped.
        """
        num_left = len(text) - self._num_emitted_chars
        for place in range(len(self._window) - 1, len(self._window) - 1 - _TRIED_CUTS, -1):
            rest = self._decoder.decode(self._window[place:])
            has_whole_char = rest[-2:-1] not in ("", _REPLACEMENT)
            if has_whole_char or (rest and self._decoder.decode(self._window[:place]) + rest == text):
                self._window = self._window[place:]
                self._num_context = 0
                self._num_emitted_chars = len(rest) - num_left
                return


def _visible_end(decoder: TokenDecoder, token_ids: Sequence[int]) -> list[int]:
    """Returns the last few token ids that have text, without skipped tokens.

    A run of byte tokens is text only as a whole, so it is returned completely; a very long run is cut where a character
    begins. Only the last 1,024 ids are examined. If all of these are skipped tokens, the result is empty.
    """
    end: list[int] = []
    for token_id in reversed(token_ids[-_MAX_LOOKED_AT:]):
        if decoder.is_skipped(token_id):
            continue
        if len(end) >= _NUM_PROMPT_TOKENS and token_id not in decoder.byte_of:
            break
        if len(end) >= _MAX_PROMPT_BYTE_RUN and not 0x80 <= decoder.byte_of.get(end[-1], 0) < 0xC0:
            break
        if len(end) == _MAX_PROMPT_BYTE_RUN + _TRIED_CUTS:
            break
        end.append(token_id)
    return end[::-1]


class _ByteRun:
    """A run of consecutive byte-fallback tokens. It is text only as a whole: one byte that is not UTF-8 turns all of it
    into U+FFFD.
    """

    def __init__(self, before: str) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._before = before
        self._chars = ""
        self._num_stripped = 0
        self._is_text = False  # False while a character is incomplete or the run is invalid
        self._is_spoilt = False

    @property
    def text(self) -> str:
        """The text `before` the run, followed by the run's own text if its bytes so far are complete characters."""
        return self._before + self._chars[self._num_stripped :] if self._is_text else self._before

    def push(self, byte: int) -> bool:
        """Adds a byte. Returns whether it completes the run's first character."""
        if self._is_spoilt:
            return False
        try:
            char = self._decoder.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._is_spoilt, self._is_text = True, False
            return False
        self._is_text = bool(char)
        self._chars += char
        return len(self._chars) == 1 and self._is_text

    def align(self, decoded: str) -> None:
        """Records whether the tokenizer's decoder strips the run's first character, such as a space that begins a text.

        `decoded` is the decoder's text for what is `before` the run, followed by that character.
        """
        self._num_stripped = len(self.text) - len(decoded)
