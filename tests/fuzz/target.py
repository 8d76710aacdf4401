"""What is fuzzed: one function of bytes for each place where a peer's bytes come in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

CORPUS = Path(__file__).with_name("corpus")

Run = Callable[[bytes], None]
"""Put one input through; raises when the contract is broken. Bounded in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`inputs` draws inputs that know the format, from seeds. `is_pure`: no network, so that coverage can guide."""

    name: str
    inputs: Callable[[tuple[bytes, ...]], st.SearchStrategy[bytes]]
    open: Callable[[], AbstractContextManager[Run]]
    is_pure: bool

    @property
    def corpus(self) -> Path:
        return CORPUS / self.name

    def seeds(self) -> tuple[bytes, ...]:
        """The corpus, in a fixed order."""
        return tuple(path.read_bytes() for path in self.corpus_files())

    def corpus_files(self) -> Iterator[Path]:
        yield from sorted(path for path in self.corpus.iterdir() if path.is_file())


def join(messages: list[bytes] | tuple[bytes, ...]) -> bytes:
    """Several messages as one input: each behind its length, 4 bytes."""
    return b"".join(len(message).to_bytes(4, "big") + message for message in messages)


def split(data: bytes, *, at_most: int = 16) -> list[bytes]:
    """The messages of any input: a length beyond the end is cut."""
    messages, position = [], 0
    while position < len(data) and len(messages) < at_most:
        length = int.from_bytes(data[position : position + 4], "big")
        position += 4
        messages.append(data[position : position + length])
        position += length
    return messages
