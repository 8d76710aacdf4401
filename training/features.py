"""Features: the target's states for every token of the data, computed once and kept in a directory.

aux.bin       bfloat16 [T, layers * H]   the inputs of the captured layers, concatenated
final.bin     bfloat16 [T, H]            the output of the final norm
argmax.bin    int32 [T]                  the target's most likely next token after each token
complete.json                            names the data and the target; it is written last, so the others are complete
                                         if it exists
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import ConfigError
from common.host.replaced_file import replaced
from training.data import Conversations, Ints
from training.progress import ConsoleProgress
from training.target import FrozenTarget

_MARKER = "complete.json"
_FILES = ("aux.bin", "final.bin", "argmax.bin")
_FORWARD_TOKENS = 4096
_ARGMAX_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class FeaturesKey:
    """Everything that the features and their shapes depend on."""

    num_tokens: int
    hidden_size: int
    layers: tuple[int, ...]
    data_digest: str
    target_digest: str

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "layers": list(self.layers)}


@dataclass(frozen=True, slots=True)
class Features:
    """The features as memory-mapped arrays.

    bfloat16 values appear as uint16 with the same bits, because numpy has no bfloat16.
    """

    aux: NDArray[np.uint16]
    final: NDArray[np.uint16]
    argmax: NDArray[np.int32]


def features_key(conversations: Conversations, target: FrozenTarget, layers: tuple[int, ...]) -> FeaturesKey:
    return FeaturesKey(
        num_tokens=conversations.tokens.size,
        hidden_size=target.config.hidden_size,
        layers=layers,
        data_digest=conversations.digest,
        target_digest=target.digest,
    )


def mark_complete(directory: Path, key: FeaturesKey) -> None:
    """Writes complete.json, which records what the features were computed from. Raises ConfigError if a file's size is
    wrong.
    """
    _check_sizes(directory, key)
    with replaced(directory / _MARKER) as unfinished:
        unfinished.write_text(json.dumps(key.as_json(), indent=2))


def is_complete(directory: Path, key: FeaturesKey) -> bool:
    """Returns whether the directory holds complete features. False means that complete.json is missing.

    Raises ConfigError, naming the difference, if they are of other data, another target or other layers.
    """
    try:
        found = json.loads((directory / _MARKER).read_text())
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory / _MARKER}: {error}") from error
    for name, value in key.as_json().items():
        if found.get(name) != value:
            raise ConfigError(f"features: {directory} has {name} {found.get(name)}, this run {value}")
    _check_sizes(directory, key)
    return True


def open_features(directory: Path, key: FeaturesKey) -> Features:
    return _map(directory, key, "c")  # torch wants writable arrays, but nothing writes to them


def compute_features(
    directory: Path, key: FeaturesKey, conversations: Conversations, target: FrozenTarget, progress: ConsoleProgress
) -> None:
    """Computes the features of all conversations into `directory`.

    It deletes the files of an interrupted computation first. It does not overwrite them, because they may be hard links
    to the files of another directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        (directory / name).unlink(missing_ok=True)
    features = _map(directory, key, "w+")
    with progress.stage("features", key.num_tokens, "tokens") as stage:
        for chosen in _forwards(conversations):
            stage.advance(_compute(features, conversations, chosen, target, key.layers))
    for array in (features.aux, features.final, features.argmax):
        assert isinstance(array, np.memmap)
        array.flush()
    mark_complete(directory, key)


def _compute(
    features: Features, conversations: Conversations, chosen: Ints, target: FrozenTarget, layers: tuple[int, ...]
) -> int:
    """Computes the features of the conversations `chosen` in one forward. Returns the number of their tokens."""
    lengths = conversations.lengths[chosen]
    token_ids = torch.zeros(len(chosen), int(lengths.max()), dtype=torch.int64)
    places = [slice(conversations.offsets[each], conversations.offsets[each + 1]) for each in chosen]
    for row, place in enumerate(places):
        token_ids[row, : lengths[row]] = torch.from_numpy(conversations.tokens[place])
    aux, final = target.states(token_ids.to(target.model.device), layers)
    for row, place in enumerate(places):
        own_final = final[row, : lengths[row]]
        features.aux[place] = _bits(aux[row, : lengths[row]])
        features.final[place] = _bits(own_final)
        best = torch.cat([target.argmax(part) for part in own_final.split(_ARGMAX_TOKENS)])
        features.argmax[place] = best.cpu().numpy()
    return int(lengths.sum())


def _forwards(conversations: Conversations) -> Iterator[Ints]:
    """Yields the conversations of each forward, which are of similar length. The shortest come first."""
    lengths = conversations.lengths
    order = np.argsort(lengths, kind="stable")
    first = 0
    while first < len(order):
        last = first + 1
        while last < len(order) and (last + 1 - first) * lengths[order[last]] <= _FORWARD_TOKENS:
            last += 1
        yield order[first:last]
        first = last


def _bits(states: Tensor) -> NDArray[np.uint16]:
    bits: NDArray[np.uint16] = states.to(torch.bfloat16).cpu().contiguous().view(torch.uint16).numpy()
    return bits


def _map(directory: Path, key: FeaturesKey, mode: Any) -> Features:
    (aux, aux_shape, bits), (final, final_shape, _), (argmax, argmax_shape, ids) = _layout(directory, key)
    return Features(
        np.memmap(aux, bits, mode, shape=aux_shape),
        np.memmap(final, bits, mode, shape=final_shape),
        np.memmap(argmax, ids, mode, shape=argmax_shape),
    )


def _layout(directory: Path, key: FeaturesKey) -> list[tuple[Path, tuple[int, ...], Any]]:
    num_tokens, size = key.num_tokens, key.hidden_size
    shapes = ((num_tokens, len(key.layers) * size), (num_tokens, size), (num_tokens,))
    dtypes = (np.uint16, np.uint16, np.int32)
    return [(directory / name, shape, dtype) for name, shape, dtype in zip(_FILES, shapes, dtypes, strict=True)]


def _check_sizes(directory: Path, key: FeaturesKey) -> None:
    for path, shape, dtype in _layout(directory, key):
        expected = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if not path.is_file() or path.stat().st_size != expected:
            raise ConfigError(f"features: {path} is not a file of {expected} bytes")
