"""One request's output as the client sees it: token ids, text and log-probabilities. They agree however the output
ends.

engine's tokens ──▶ detokenise ──▶ find stop strings, hold back what may begin one ──▶ pieces
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from common.grammar.reasoning import Reasoning, ReasoningCount, len_of_begun
from common.sampling.params import TokenLogprobs
from common.text.tokenizer import TokenDecoder
from decode_service.edge.text.detokenizer import IncrementalDetokenizer


@dataclass(frozen=True, slots=True)
class OutputLogprobs:
    """The log-probabilities of one output token.

    `token` and `top_tokens` are the bytes of the chosen token and of each of `logprobs.top_ids`.
    """

    logprobs: TokenLogprobs
    token: bytes
    top_tokens: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class NewOutput:
    """New output. Its text may lag behind its ids. `logprobs` has one entry per id, or none at all."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[OutputLogprobs, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.token_ids or self.text)

    def __add__(self, later: NewOutput) -> NewOutput:
        return NewOutput(self.token_ids + later.token_ids, self.text + later.text, self.logprobs + later.logprobs)


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string found in the output.

    `num_output_tokens` is the number of the output token that completed it, counted from 1.
    """

    stop_string: str
    num_output_tokens: int


class OutputProcessor:
    """Turns a request's output tokens into text and finds stop strings.

    The output's ids end with the token that completes a stop string or ends the output. The text ends before the stop
    string or the ending token's text, or after it if `includes_stop`. If several stop strings match, the one completed
    first counts, then the one that begins first, however tokens split the text. A stop string that is completed within
    the first `min_tokens` tokens does not count. `num_reasoning_tokens` counts the output's tokens up to the one that
    ends its `reasoning`. `generated_token_ids` were delivered by an earlier stream of the same request: they are
    processed first, and not returned again.
    """

    def __init__(
        self,
        *,
        decoder: TokenDecoder,
        prompt_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        end_token_ids: Set[int] = frozenset(),
        includes_stop: bool = False,
        min_tokens: int = 0,
        reasoning: Reasoning | None = None,
        generated_token_ids: Sequence[int] = (),
    ) -> None:
        self._decoder = decoder
        self._detokenizer = IncrementalDetokenizer(decoder, prompt_token_ids)
        self._stop_strings = tuple(stop_strings)
        self._end_token_ids = end_token_ids
        self._includes_stop = includes_stop
        self._min_tokens = min_tokens
        self._held = ""  # text that may begin a stop string
        # the text up to here cannot complete a stop string; counted in chars from the start of `_held`
        self._num_exempt_chars = 0
        self._num_output_tokens = 0
        self._match: StopMatch | None = None
        self._reasoning = None if reasoning is None else ReasoningCount(reasoning, decoder.bytes_of)
        self.push(generated_token_ids)

    @property
    def match(self) -> StopMatch | None:
        """The stop string's match, or None if none was found so far. Tokens after the match are dropped."""
        return self._match

    @property
    def num_output_tokens(self) -> int:
        return self._num_output_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> NewOutput:
        if not (self._stop_strings or logprobs):
            return NewOutput(tuple(token_ids), self._push_all(token_ids))
        texts: list[str] = []
        positions: list[OutputLogprobs] = []
        for token_id in token_ids:
            if self._match is not None:
                break
            if logprobs:
                positions.append(self._position(token_id, logprobs[len(texts)]))
            texts.append(self._push_one(token_id))
        return NewOutput(tuple(token_ids[: len(texts)]), "".join(texts), tuple(positions))

    def _push_all(self, token_ids: Sequence[int]) -> str:
        num_before = self._num_output_tokens
        self._num_output_tokens += len(token_ids)
        if self._reasoning is not None:
            for token_id in token_ids:
                self._reasoning.add(token_id)
        if self._end_token_ids.isdisjoint(token_ids) or self._includes_stop:
            return self._detokenizer.push_all(token_ids)
        return self._detokenizer.push_all(
            [
                token_id
                for number, token_id in enumerate(token_ids, num_before + 1)
                if token_id not in self._end_token_ids or number <= self._min_tokens
            ]
        )

    def finish(self) -> str:
        """Returns the text that is still held back. Call it after the engine has ended the output.

        No stop string can be completed any more, so nothing needs to be held back.
        """
        if self._match is not None:
            return ""
        rest = self._held + self._detokenizer.flush()
        self._held = ""
        return rest

    def _position(self, token_id: int, logprobs: TokenLogprobs) -> OutputLogprobs:
        token, *top = (
            self._decoder.bytes_of(each, begins_text=self._detokenizer.begins_text)
            for each in (token_id, *logprobs.top_ids)
        )
        return OutputLogprobs(logprobs, token, tuple(top))

    def _push_one(self, token_id: int) -> str:
        self._num_output_tokens += 1
        if self._reasoning is not None:
            self._reasoning.add(token_id)
        is_exempt = self._num_output_tokens <= self._min_tokens
        if token_id in self._end_token_ids and not is_exempt and not self._includes_stop:
            return ""
        decoded = self._detokenizer.push(token_id)
        if not self._stop_strings:
            return decoded.text
        self._held += decoded.text
        visible = self._held + decoded.tail
        if is_exempt:
            self._num_exempt_chars = len(visible)
        elif found := self._find(visible):
            start, stop_string = found
            self._match = StopMatch(stop_string, self._num_output_tokens)
            self._held = ""
            return visible[: start + len(stop_string)] if self._includes_stop else visible[:start]
        return self._release(visible)

    def _find(self, visible: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stop_strings:
            start = visible.find(stop, max(0, self._num_exempt_chars - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _release(self, visible: str) -> str:
        num_kept = max(len_of_begun(visible, stop) for stop in self._stop_strings)
        num_released = min(len(self._held), len(visible) - num_kept)
        released, self._held = self._held[:num_released], self._held[num_released:]
        self._num_exempt_chars = max(0, self._num_exempt_chars - num_released)
        return released
