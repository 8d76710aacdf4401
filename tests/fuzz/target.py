"""The type of a fuzz target: a function of bytes for one place where a service takes a peer's bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

CORPUS = Path(__file__).with_name("corpus")

Run = Callable[[bytes], None]
"""A function that runs one input, in bounded time. It raises an exception if the contract is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A fuzz target. `inputs` takes seeds and draws inputs that follow the format. A target that `is_pure` runs in one
    process and uses no network, so that code coverage can guide its inputs.
    """

    name: str
    inputs: Callable[[tuple[bytes, ...]], st.SearchStrategy[bytes]]
    open: Callable[[], AbstractContextManager[Run]]
    is_pure: bool

    @property
    def corpus(self) -> Path:
        return CORPUS / self.name

    def seeds(self) -> tuple[bytes, ...]:
        """Returns the contents of the corpus, in a fixed order."""
        return tuple(path.read_bytes() for path in self.corpus_files())

    def corpus_files(self) -> Iterator[Path]:
        yield from sorted(path for path in self.corpus.iterdir() if path.is_file())


def join(messages: list[bytes] | tuple[bytes, ...]) -> bytes:
    """Joins several messages into one input. Each message follows its length in 4 bytes."""
    return b"".join(len(message).to_bytes(4, "big") + message for message in messages)


def split(data: bytes) -> list[bytes]:
    """Splits any input into at most 16 messages. A message whose length goes beyond the end is cut."""
    messages, position = [], 0
    while position < len(data) and len(messages) < 16:
        length = int.from_bytes(data[position : position + 4], "big")
        position += 4
        messages.append(data[position : position + length])
        position += length
    return messages
