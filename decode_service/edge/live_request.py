"""One live request's output, between the engine's events and the client's stream. For the event loop only.

A resumed request brings output along, which may be complete already: `ending_of_brought` says so.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.errors import BatonError, InvalidRequest
from common.sampling.params import ResolvedSampling, TokenLogprobs
from common.sampling.prompt_logprobs import PromptLogprobs
from common.telemetry.stats import SpeculationCounts, Timings
from decode_service.edge.request_trace import UNTRACED, RequestTrace
from decode_service.edge.text.output import NewOutput, OutputProcessor, StopMatch
from decode_service.messages import Finished, FinishReason

_PIECE_TOKENS = 256
"""The most tokens whose log-probabilities are read at once, so that a message to the client stays small."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The successful end of a request, as its client sees it."""

    reason: FinishReason
    num_prompt_tokens: int
    num_completion_tokens: int
    num_reasoning_tokens: int
    timings: Timings
    speculation: SpeculationCounts | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(slots=True)
class LiveRequest:
    """One request from its admission to its end, with the output that its client has not read.

    Unread output is merged, with log-probabilities into pieces of at most 256 tokens. So at most the request's whole
    output is held, besides the log-probabilities of its prompt. The first terminal event counts, and later ones are
    dropped.
    """

    request_id: str
    engine_id: str
    trace: RequestTrace = UNTRACED
    last_token_at_s: float | None = None  # kept for measurements
    due_s: float = math.inf  # when it is due (see common/priority.py), from its admission on
    has_had_row: bool = False
    is_done_in_engine: bool = False  # the engine has posted its last event about it
    held_bytes: int = 0  # taken from the budget for prompts' log-probabilities
    _output: OutputProcessor | None = None
    _num_prompt_tokens: int = 0
    _prompt_logprobs: deque[PromptLogprobs] = field(default_factory=deque)
    _pending: deque[NewOutput] = field(default_factory=deque)
    _ending: Ending | BatonError | None = None
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, output: OutputProcessor, num_prompt_tokens: int) -> None:
        """Prepares for output tokens. Call it once the prompt is known, before the engine gets the request."""
        self._output = output
        self._num_prompt_tokens = num_prompt_tokens

    def end_at_once(self, output: OutputProcessor, num_prompt_tokens: int) -> None:
        """Marks the request as done without the engine, because the output that it brought along is complete."""
        self.begin(output, num_prompt_tokens)
        self.is_done_in_engine = True

    @property
    def is_submitted(self) -> bool:
        return self._output is not None

    @property
    def is_waiting(self) -> bool:
        """Whether the engine has the request, and it has had no row and no output yet."""
        has_begun = self.has_had_row or self.num_output_tokens > 0
        return self.is_submitted and not has_begun and self._ending is None

    def take_row(self) -> None:
        """Notes that the request has got a row. It keeps its place from now on."""
        self.has_had_row = True

    @property
    def ending(self) -> Ending | BatonError | None:
        return self._ending

    def add_tokens(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> StopMatch | None:
        """Adds output tokens. `logprobs` has one entry per token or is empty.

        Returns the stop string's match if these tokens complete one, and None otherwise.
        """
        if self._ending is not None or self._output is None or self._output.match is not None:
            return None
        for start in range(0, len(token_ids), _PIECE_TOKENS):
            part = slice(start, start + _PIECE_TOKENS)
            self._add(self._output.push(token_ids[part], logprobs[part]))
        return self._output.match

    def _add(self, new: NewOutput) -> None:
        if not new:
            return
        num_tokens = len(new.token_ids) + (len(self._pending[-1].token_ids) if self._pending else 0)
        if self._pending and (not new.logprobs or num_tokens <= _PIECE_TOKENS):
            self._pending[-1] += new
        else:
            self._pending.append(new)
        self._has_news.set()

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        if self._ending is not None:
            return
        for start in range(logprobs.start, logprobs.stop, _PIECE_TOKENS):
            self._prompt_logprobs.append(logprobs.part(start, min(start + _PIECE_TOKENS, logprobs.stop)))
        self._has_news.set()

    def finish(self, finished: Finished) -> None:
        self.is_done_in_engine = True
        if self._ending is not None or self._output is None:
            return
        match = self._output.match
        self._add(NewOutput(text=self._output.finish()))
        self._end(
            Ending(
                reason=finished.reason if match is None else FinishReason.STOP_STRING,
                num_prompt_tokens=finished.num_prompt_tokens,
                num_completion_tokens=finished.num_completion_tokens if match is None else match.num_output_tokens,
                num_reasoning_tokens=self._output.num_reasoning_tokens,
                timings=finished.timings,
                speculation=finished.speculation,
                stop_token_id=finished.stop_token_id if match is None else None,
                stop_string=None if match is None else match.stop_string,
            )
        )

    def fail(self, error: BatonError) -> None:
        """Ends the request with `error`, unless a stop string has already completed its output.

        If one has, the request ends successfully, only without the engine's timings.
        """
        if self._ending is not None:
            return
        output = self._output
        if output is None or (match := output.match) is None:
            self._end(error)
            return
        self._end(
            Ending(
                reason=FinishReason.STOP_STRING,
                num_prompt_tokens=self._num_prompt_tokens,
                num_completion_tokens=match.num_output_tokens,
                num_reasoning_tokens=output.num_reasoning_tokens,
                timings=Timings(),
                stop_string=match.stop_string,
            )
        )

    def fail_by_engine(self, error: BatonError) -> None:
        self.is_done_in_engine = True
        self.fail(error)

    async def read(self) -> PromptLogprobs | NewOutput | Ending:
        """Waits for news and returns it: at first log-probabilities of the prompt, for at most 256 tokens; if none are
        left, the next piece of output; when all of that was read, the ending.

        Raises the error if the request failed.
        """
        await self._has_news.wait()
        if self._prompt_logprobs or self._pending:
            news: PromptLogprobs | NewOutput
            news = self._prompt_logprobs.popleft() if self._prompt_logprobs else self._pending.popleft()
            if self._ending is None and not self._prompt_logprobs and not self._pending:
                self._has_news.clear()
            return news
        assert self._ending is not None
        if isinstance(self._ending, BatonError):
            raise self._ending
        return self._ending

    @property
    def num_output_tokens(self) -> int:
        return 0 if self._output is None else self._output.num_output_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt_tokens

    def _end(self, ending: Ending | BatonError) -> None:
        self._ending = ending
        self._has_news.set()


def ending_of_brought(
    token_ids: Sequence[int], *, sampling: ResolvedSampling, output: OutputProcessor, num_prompt_tokens: int
) -> Ending | None:
    """Returns the ending of a resumed request whose output is already complete, or None if the output goes on.

    It is the ending that the earlier stream would have sent if it had not broken; that stream sent all text.
    `token_ids` is the output that the request brings along, and `output` has processed it. A request that brings no
    output along is not complete, even if it wants none. Raises InvalidRequest if tokens follow the end.
    """
    if not token_ids:
        return None
    ends = [index + 1 for index, token_id in enumerate(token_ids) if _ends(token_id, index, sampling)]
    ends.append(sampling.max_tokens)
    if output.match is not None:
        ends.append(output.match.num_output_tokens)
    num_output_tokens = min(ends)
    if len(token_ids) < num_output_tokens:
        return None
    if len(token_ids) > num_output_tokens:
        raise InvalidRequest(
            "generated_token_ids", f"the output ended after {num_output_tokens} tokens, {len(token_ids)} were given"
        )
    reason, stop_token_id, stop_string = FinishReason.LENGTH, None, None
    last = token_ids[-1]
    if output.match is not None:
        reason, stop_string = FinishReason.STOP_STRING, output.match.stop_string
    elif _ends(last, len(token_ids) - 1, sampling):
        is_eos = last in sampling.eos_token_ids
        reason, stop_token_id = (FinishReason.EOS, None) if is_eos else (FinishReason.STOP_TOKEN, last)
    return Ending(
        reason=reason,
        num_prompt_tokens=num_prompt_tokens,
        num_completion_tokens=num_output_tokens,
        num_reasoning_tokens=output.num_reasoning_tokens,
        timings=Timings(),
        stop_token_id=stop_token_id,
        stop_string=stop_string,
    )


def _ends(token_id: int, index: int, sampling: ResolvedSampling) -> bool:
    return index >= sampling.min_tokens and token_id in sampling.end_token_ids
