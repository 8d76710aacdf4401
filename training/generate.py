"""Makes training conversations by letting the target model, served by a running pair, ask and answer questions.

The model makes up each question by continuing the chat template's start of a user message, or the question is read from
a file. Then the model answers it. Conversation number i depends only on the options and on i, so an interrupted file
can be continued with the same result. The file records the options.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.client import AsyncClient
from baton.events import FinishReason
from common.errors import ConfigError
from common.host.replaced_file import replaced
from common.text.chat_messages import ChatMessage
from common.text.tokenizer import PromptEncoder, TextTokenizer
from training.data import load_conversations
from training.progress import ConsoleProgress

ANSWER_TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
_QUESTION_TEMPERATURE = 1.0
_TOP_P = 0.95
_QUESTION_TOKENS = 128
_NUM_TRIES = 20
_SAVE_EVERY = 50


@dataclass(frozen=True, slots=True)
class Conversation:
    """One question with its answer, as token ids.

    `prompt` is the question in the chat template. `answer` ends with the end token, unless it was cut off.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    temperature: float


@dataclass(frozen=True, slots=True)
class Openings:
    """The beginnings of questions: the model continues one of `lines`. `digest` is the digest of their file."""

    lines: tuple[str, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions from a file: conversation i answers `texts[i]`. `digest` is the digest of the file."""

    texts: tuple[str, ...]
    digest: str


def read_openings(path: Path) -> Openings:
    """Reads the lines of a text file, stripped, without blank ones. Raises ConfigError if it cannot be read."""
    text, digest = _read_text(path, "--openings")
    lines = tuple(line.strip() for line in text.split("\n") if line.strip())
    if not lines:
        raise ConfigError(f"--openings: {path}: every line is blank")
    return Openings(lines, digest)


def read_questions(path: Path) -> Questions:
    """Reads questions from a file of JSON lines. Blank lines are skipped. Raises ConfigError, naming the wrong line."""
    text, digest = _read_text(path, "--questions")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return Questions(tuple(_parse_question(path, number, line) for number, line in lines), digest)


class SelfChat:
    """Makes conversations with the model that `client` serves.

    `encoder` is that model's tokenizer, and `model_digest` its digest. `source` gives the questions or their
    beginnings; with None the model makes up whole questions. Raises ConfigError for a model without a chat template,
    and for questions or beginnings that contain special tokens.
    """

    def __init__(
        self,
        client: AsyncClient,
        encoder: TextTokenizer,
        *,
        model_digest: str,
        seed: int,
        max_answer_tokens: int,
        temperatures: Sequence[float] = ANSWER_TEMPERATURES,
        source: Openings | Questions | None = None,
    ) -> None:
        self._client = client
        self._encoder = encoder
        self._model_digest = model_digest
        self._seed = seed
        self._max_answer_tokens = max_answer_tokens
        self._temperatures = tuple(temperatures)
        self._source = source
        self._user_opening = _user_opening(encoder)
        lines = source.lines if isinstance(source, Openings) else ()
        self._openings = [(line, _plain_tokens(encoder, line, "--openings")) for line in lines]
        for text in source.texts if isinstance(source, Questions) else ():
            _plain_tokens(encoder, text, "--questions")

    @property
    def options(self) -> dict[str, Any]:
        """Returns the options that the content of the conversations depends on."""
        return {
            "model": self._model_digest,
            "seed": self._seed,
            "max_answer_tokens": self._max_answer_tokens,
            "temperatures": list(self._temperatures),
            "openings": self._source.digest if isinstance(self._source, Openings) else None,
            "questions": self._source.digest if isinstance(self._source, Questions) else None,
        }

    def require_questions(self, num_conversations: int) -> None:
        """Raises ConfigError if questions come from a file that has fewer than `num_conversations`."""
        if isinstance(self._source, Questions) and num_conversations > len(self._source.texts):
            raise ConfigError(
                f"--conversations: {num_conversations} are more than the {len(self._source.texts)} of --questions"
            )

    async def conversation(self, number: int) -> Conversation:
        """Makes the conversation with this number.

        Raises ConfigError if every question that the model makes up is empty or too long.
        """
        random = np.random.default_rng((self._seed, number))
        if isinstance(self._source, Questions):
            return await self._answered(self._source.texts[number], random)
        for _ in range(_NUM_TRIES):
            question = await self._sampled_question(random)
            if question:
                return await self._answered(question, random)
        raise ConfigError(f"model: {_NUM_TRIES} sampled questions were empty, or longer than {_QUESTION_TOKENS} tokens")

    async def _sampled_question(self, random: np.random.Generator) -> str:
        """Lets the model make up a question. Returns "" if the question does not end in time."""
        line, begun = self._openings[random.integers(len(self._openings))] if self._openings else ("", ())
        sampled = await self._client.complete(
            token_ids=self._user_opening + begun,
            temperature=_QUESTION_TEMPERATURE,
            top_p=_TOP_P,
            max_tokens=_QUESTION_TOKENS,
            seed=_draw_seed(random),
        )
        if sampled.finish_reason is not FinishReason.EOS:
            return ""
        if not line:
            return sampled.text.strip()
        # Decoded alone, the continuation may lose the space that it begins with.
        whole = self._encoder.decode(begun + sampled.token_ids)
        return (line + whole[len(self._encoder.decode(begun)) :]).strip()

    async def _answered(self, question: str, random: np.random.Generator) -> Conversation:
        prompt = self._encoder.encode_chat([ChatMessage("user", question)])
        temperature = float(random.choice(self._temperatures))
        answer = await self._client.complete(
            token_ids=prompt,
            temperature=temperature,
            top_p=_TOP_P if temperature else None,
            max_tokens=self._max_answer_tokens,
            seed=_draw_seed(random),
        )
        return Conversation(prompt, answer.token_ids, temperature)


async def write_self_chat(
    out: Path,
    self_chat: SelfChat,
    *,
    num_conversations: int,
    vocab_size: int,
    concurrency: int,
    progress: ConsoleProgress,
) -> int:
    """Adds conversations to the file `out` until it has `num_conversations`. Those made before an interruption are
    kept.

    Returns how many were in the file before. Raises ConfigError if the file has another format or other options, and if
    there are fewer questions than conversations.
    """
    self_chat.require_questions(num_conversations)
    options = self_chat.options
    made = _read(out, vocab_size, options)
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
                # Keeps twice as many tasks as run at a time, so that a long conversation does not delay those after it.
                pending.extend(
                    asyncio.create_task(make(number)) for number in islice(numbers, 2 * concurrency - len(pending))
                )
                if not pending:
                    return num_before
                made.append(await pending.popleft())
                num_tokens += len(made[-1].answer)
                stage.advance(1, f"{num_tokens} answer tokens")
                if len(made) % _SAVE_EVERY == 0:
                    _write(out, made, vocab_size, options)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            if len(made) > num_before:
                _write(out, made, vocab_size, options)


def _user_opening(encoder: PromptEncoder) -> tuple[int, ...]:
    """Returns the tokens before a user's text in the chat template: the common prefix of two prompts with different
    texts.
    """
    try:
        first, second = (encoder.encode_chat([ChatMessage("user", word)]) for word in ("What", "how"))
    except ValueError as error:
        raise ConfigError(f"model: {error}") from error
    return first[: next(index for index, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])]


def _plain_tokens(encoder: TextTokenizer, line: str, option: str) -> tuple[int, ...]:
    """Encodes a line, and leaves out the special tokens that the tokenizer adds.

    Raises ConfigError, naming `option`, if the line itself contains special tokens.
    """
    encoded = encoder.encode(line)
    plain = tuple(token_id for token_id in encoded if token_id not in encoder.special_ids)
    if len(encoded) - len(plain) != len(encoder.encode("")):
        raise ConfigError(f"{option}: {line!r} holds special tokens of the model")
    return plain


def _read_text(path: Path, option: str) -> tuple[str, str]:
    """Returns the text of a file, and its digest. Raises ConfigError, naming `option`, if it cannot be read."""
    try:
        data = path.read_bytes()
        return data.decode(), hashlib.blake2b(data, digest_size=16).hexdigest()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {path}: no text to read: {error}") from error


def _parse_question(path: Path, number: int, line: str) -> str:
    try:
        question = json.loads(line)["question"]
    except (ValueError, TypeError, KeyError):
        question = None
    if not isinstance(question, str) or not question.strip():
        raise ConfigError(f'--questions: {path}: line {number} is no object with a string "question", or that is blank')
    return question


def _draw_seed(random: np.random.Generator) -> int:
    return int(random.integers(2**63))


def _read(path: Path, vocab_size: int, options: dict[str, Any]) -> list[Conversation]:
    if not path.exists():
        return []
    stored = load_conversations(path, vocab_size=vocab_size)
    with np.load(path) as arrays:
        if "temperature" not in arrays or arrays["temperature"].shape != stored.answer_start.shape:
            raise ConfigError(f"{path}: the array temperature is missing, or not one value for each conversation")
        temperatures = arrays["temperature"]
        _check_options(path, arrays, options)
    made = []
    for place, (start, stop) in enumerate(zip(stored.offsets[:-1], stored.offsets[1:], strict=True)):
        tokens, first = stored.tokens[start:stop].tolist(), int(stored.answer_start[place])
        made.append(Conversation(tuple(tokens[:first]), tuple(tokens[first:]), float(temperatures[place])))
    return made


def _check_options(path: Path, arrays: Mapping[str, NDArray[Any]], options: dict[str, Any]) -> None:
    """Raises ConfigError, which names the first option that differs from the file's."""
    if "options" not in arrays:
        raise ConfigError(f"{path}: the array options is missing: it cannot be told how the file was begun")
    try:
        begun = dict(json.loads(arrays["options"].item()))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: options is no JSON object: it cannot be told how the file was begun") from error
    for name in {**options, **begun}:
        ours, theirs = options.get(name), begun.get(name)
        if ours != theirs:
            raise ConfigError(f"{name}: this run has {ours}, {path} was begun with {theirs}")


def _write(path: Path, made: list[Conversation], vocab_size: int, options: dict[str, Any]) -> None:
    """Writes the conversations to the file, which is replaced as a whole."""
    tokens = [each.prompt + each.answer for each in made]
    with replaced(path) as unfinished, unfinished.open("wb") as file:
        np.savez_compressed(
            file,
            tokens=np.concatenate(tokens).astype(np.uint16 if vocab_size <= 2**16 else np.int32),
            offsets=np.cumsum([0, *map(len, tokens)], dtype=np.int64),
            answer_start=np.array([len(each.prompt) for each in made], dtype=np.int32),
            temperature=np.array([each.temperature for each in made], dtype=np.float32),
            options=np.array(json.dumps(options)),
        )
