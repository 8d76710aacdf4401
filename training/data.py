"""Reads conversations to train on from .npz files.

| array | dtype, shape | meaning |
|---|---|---|
| `tokens` | uint16 or int32 [T] | token ids, all conversations end to end |
| `offsets` | int64 [C + 1] | conversation c is `tokens[offsets[c]:offsets[c + 1]]` |
| `answer_start` | int32 [C] | where in a conversation the answer begins: the loss belongs to tokens from there on |

Other arrays are ignored.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import ConfigError

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Conversations:
    """C conversations with T tokens in all, in the arrays of the file format: `tokens` [T], `offsets` [C + 1],
    `answer_start` [C].

    All are int64 and have been checked.
    """

    tokens: Ints
    offsets: Ints
    answer_start: Ints

    @property
    def lengths(self) -> Ints:
        """Returns the number of tokens of each conversation, [C]."""
        return np.diff(self.offsets)

    @property
    def digest(self) -> str:
        """Returns a digest of tokens and offsets, which decide the target's states. `answer_start` does not count."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.tokens, self.offsets):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def num_answer_tokens(self, chosen: Ints) -> int:
        return int((self.lengths[chosen] - self.answer_start[chosen]).sum())

    def answer_tokens(self, chosen: Ints) -> Ints:
        """Returns the tokens of the answers in the conversations `chosen`, end to end."""
        answers = [
            self.tokens[start + first : end]
            for start, first, end in zip(
                self.offsets[chosen], self.answer_start[chosen], self.offsets[chosen + 1], strict=True
            )
        ]
        return np.concatenate(answers)


def load_conversations(path: Path, *, vocab_size: int) -> Conversations:
    """Loads and checks a file of conversations. Raises ConfigError, which names the file and the wrong array."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            named = {name: _integers(path, arrays, name) for name in ("tokens", "offsets", "answer_start")}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: no .npz file to read: {error}") from error
    conversations = Conversations(**named)
    _check(path, conversations, vocab_size)
    return conversations


def join(parts: Sequence[Conversations]) -> Conversations:
    """Returns the conversations of all `parts` in one, end to end. There must be at least one part."""
    lengths = np.concatenate([part.lengths for part in parts])
    return Conversations(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([[0], np.cumsum(lengths)]),
        np.concatenate([part.answer_start for part in parts]),
    )


def split(
    parts: Sequence[Conversations], names: Sequence[object], *, num_held_out: int, seed: int
) -> tuple[Ints, Ints]:
    """Divides the conversations of each part into those to train on and `num_held_out` held-out ones.

    Returns both as arrays of indices into the result of `join`. The choice in one part does not depend on the other
    parts. Raises ConfigError, naming the part, if a part has nothing to train on.
    """
    train, held_out, num_before = [], [], 0
    for part, name in zip(parts, names, strict=True):
        num_conversations = len(part.answer_start)
        if num_conversations <= num_held_out:
            raise ConfigError(
                f"num_held_out: {num_held_out} of {num_conversations} conversations leave none of {name} to train on"
            )
        order = num_before + np.random.RandomState(seed).permutation(num_conversations)
        train.append(order[num_held_out:])
        held_out.append(order[:num_held_out])
        num_before += num_conversations
    return np.concatenate(train), np.concatenate(held_out)


def _integers(path: Path, arrays: Mapping[str, NDArray[np.generic]], name: str) -> Ints:
    if name not in arrays:
        raise ConfigError(f"{path}: the array {name} is missing")
    array = arrays[name]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"{path}: {name} is {array.dtype} {list(array.shape)}, not integers in one dimension")
    return array.astype(np.int64)


def _check(path: Path, conversations: Conversations, vocab_size: int) -> None:
    tokens, offsets, answer_start = conversations.tokens, conversations.offsets, conversations.answer_start

    def require(holds: bool, message: str) -> None:
        if not holds:
            raise ConfigError(f"{path}: {message}")

    require(offsets.size >= 2, "offsets: there is no conversation")
    require(offsets[0] == 0, f"offsets: begin at {offsets[0]}, not at 0")
    require(bool((np.diff(offsets) > 0).all()), "offsets: not strictly ascending")
    require(offsets[-1] == tokens.size, f"offsets: end at {offsets[-1]}, there are {tokens.size} tokens")
    require(
        answer_start.size == offsets.size - 1,
        f"answer_start: {answer_start.size} values for {offsets.size - 1} conversations",
    )
    inside = (answer_start >= 1) & (answer_start < conversations.lengths)
    require(bool(inside.all()), f"answer_start: outside conversation {int(np.argmin(inside))}, or at its first token")
    known = (tokens >= 0) & (tokens < vocab_size)
    require(bool(known.all()), f"tokens: {tokens[np.argmin(known)]} is outside the target's vocabulary of {vocab_size}")
