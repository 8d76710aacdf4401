"""Makes conversations to train on: the target's own, through a running pair.

A question is sampled from the chat template's opening of the user's turn, then answered. Conversation number i depends
on the seed and i only, so a file that was begun is continued as if it had never been left.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from baton.client import AsyncClient
from baton.events import FinishReason
from common.errors import ConfigError
from common.tokenizer import PromptEncoder
from training.data import load_conversations
from training.progress import Progress

ANSWER_TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
_QUESTION_TEMPERATURE = 1.0
_TOP_P = 0.95
_QUESTION_TOKENS = 128
_NUM_TRIES = 20
_SAVE_EVERY = 50


@dataclass(frozen=True, slots=True)
class Conversation:
    """One turn: `prompt` is the question in its template; `answer` includes its end token, if it ended."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float


class SelfChat:
    """Asks `client` for conversations; `encoder` is the tokenizer of the model it serves."""

    def __init__(self, client: AsyncClient, encoder: PromptEncoder, *, seed: int, max_answer_tokens: int) -> None:
        self._client = client
        self._encoder = encoder
        self._seed = seed
        self._max_answer_tokens = max_answer_tokens
        self._opening = _user_opening(encoder)

    async def conversation(self, number: int) -> Conversation:
        """Raises ConfigError where the model asks no question that ends."""
        random = np.random.default_rng((self._seed, number))
        for _ in range(_NUM_TRIES):
            question = await self._client.complete(
                token_ids=self._opening,
                temperature=_QUESTION_TEMPERATURE,
                top_p=_TOP_P,
                max_tokens=_QUESTION_TOKENS,
                seed=_draw_seed(random),
            )
            text = question.text.strip()
            if text and question.finish_reason is FinishReason.EOS:
                return await self._answered(text, random)
        raise ConfigError(f"model: {_NUM_TRIES} sampled questions were empty, or longer than {_QUESTION_TOKENS} tokens")

    async def _answered(self, question: str, random: np.random.Generator) -> Conversation:
        prompt = self._encoder.encode_chat([("user", question)])
        temperature = float(random.choice(ANSWER_TEMPERATURES))
        answer = await self._client.complete(
            token_ids=prompt,
            temperature=temperature,
            top_p=_TOP_P if temperature else None,
            max_tokens=self._max_answer_tokens,
            seed=_draw_seed(random),
        )
        return Conversation(prompt, answer.token_ids, temperature)


async def write_self_chat(
    out: Path, self_chat: SelfChat, *, num_conversations: int, vocab_size: int, concurrency: int, progress: Progress
) -> int:
    """Add conversations to `out` until it has `num_conversations`; what is made is kept when this is interrupted.

    Returns how many were there before. Raises ConfigError for a file that is not of this format.
    """
    made = _read(out, vocab_size)
    num_before, num_tokens = len(made), 0
    slots = asyncio.Semaphore(concurrency)

    async def make(number: int) -> Conversation:
        async with slots:
            return await self_chat.conversation(number)

    numbers = iter(range(num_before, num_conversations))
    pending: deque[asyncio.Task[Conversation]] = deque()
    with progress.stage("self-chat", num_conversations, "conversations", num_done=num_before) as stage:
        try:
            while True:
                # Twice as many as run at a time, so that a long one does not hold up those after it.
                pending.extend(
                    asyncio.create_task(make(number)) for number in islice(numbers, 2 * concurrency - len(pending))
                )
                if not pending:
                    return num_before
                made.append(await pending.popleft())
                num_tokens += len(made[-1].answer)
                stage.advance(1, f"{num_tokens} answer tokens")
                if len(made) % _SAVE_EVERY == 0:
                    _write(out, made, vocab_size)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            if len(made) > num_before:
                _write(out, made, vocab_size)


def _user_opening(encoder: PromptEncoder) -> tuple[int, ...]:
    """The tokens before a user's words: what two conversations with other words have in common."""
    try:
        first, second = (encoder.encode_chat([("user", word)]) for word in ("What", "how"))
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
    return first[: next(index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])]


def _draw_seed(random: np.random.Generator) -> int:
    return int(random.integers(2**63))


def _read(path: Path, vocab_size: int) -> list[Conversation]:
    if not path.exists():
        return []
    stored = load_conversations(path, vocab_size=vocab_size)
    with np.load(path) as arrays:
        if "temperature" not in arrays or arrays["temperature"].shape != stored.answer_start.shape:
            raise ConfigError(f"{path}: the array temperature is missing, or not one value for each conversation")
        temperatures = arrays["temperature"]
    made = []
    for place, (start, stop) in enumerate(zip(stored.offsets[:-1], stored.offsets[1:], strict=True)):
        tokens, first = stored.tokens[start:stop].tolist(), int(stored.answer_start[place])
        made.append(Conversation(tuple(tokens[:first]), tuple(tokens[first:]), float(temperatures[place])))
    return made


def _write(path: Path, made: list[Conversation], vocab_size: int) -> None:
    """The file is replaced whole."""
    tokens = [each.prompt + each.answer for each in made]
    unfinished = path.with_name(f"{path.name}.new")
    with unfinished.open("wb") as file:
        np.savez_compressed(
            file,
            tokens=np.concatenate(tokens).astype(np.uint16 if vocab_size <= 2**16 else np.int32),
            offsets=np.cumsum([0, *map(len, tokens)], dtype=np.int64),
            answer_start=np.array([len(each.prompt) for each in made], dtype=np.int32),
            temperature=np.array([each.temperature for each in made], dtype=np.float32),
        )
    os.replace(unfinished, path)
