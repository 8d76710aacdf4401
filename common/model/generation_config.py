"""Reads the tokens that end a model's output, and the sampling options that its generation config recommends.

Defaults of the config's class are ignored, because they belong to another checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import UnsupportedModel
from common.model.model_files import CONFIG, GENERATION_CONFIG, read_object
from common.sampling.params import MAX_END_TOKEN_IDS, NUMBER_OPTIONS

_FIELD = "eos_token_id"
_CONFIGS = (GENERATION_CONFIG, CONFIG)


def read_end_tokens(directory: Path) -> dict[int, str]:
    """Returns the ids that generation_config.json and config.json name, each with the file and field that names it
    first.

    Raises UnsupportedModel, which names file and field, if a value is no token id.
    """
    sources: dict[int, str] = {}
    for name in _CONFIGS:
        source = f"{directory.name}/{name}: {_FIELD}"
        content = read_object(directory / name) if (directory / name).exists() else {}
        for token_id in _ids(content.get(_FIELD), source):
            sources.setdefault(token_id, source)
    return sources


def end_token_ids(
    directory: Path, sources: Mapping[int, str], tokenizer: Any | None, *, vocab_size: int
) -> tuple[int, ...]:
    """Returns the ids in `sources` (see `read_end_tokens`), and the id of the tokenizer's end token, if it has one.

    Raises UnsupportedModel, naming file and field, if an id is outside the vocabulary, or if there are more ids than a
    request can carry.
    """
    sources = dict(sources)
    if tokenizer is not None and (own := tokenizer.eos_token_id) is not None:
        sources.setdefault(own, f"{directory.name}: the tokenizer's eos_token")
    for token_id, source in sources.items():
        if token_id >= vocab_size:
            raise UnsupportedModel(f"{source} {token_id} is past the vocabulary of {vocab_size}")
    if len(sources) > MAX_END_TOKEN_IDS:
        source = next(iter(sources.values()))
        raise UnsupportedModel(f"{source}: {len(sources)} end tokens, more than {MAX_END_TOKEN_IDS}")
    return tuple(sources)


def read_sampling_defaults(directory: Path) -> Mapping[str, float]:
    """Returns the options that generation_config.json names, by name. Options that are null count as absent.

    As for transformers, `do_sample: false` means greedy, whatever the temperature, and a whole number may be written as
    50.0. A `top_k` of -1 means all tokens, as in other servers; transformers refuses it.

    Raises UnsupportedModel, which names file and field, for a value that a request could not have either.
    """
    path = directory / GENERATION_CONFIG
    content = read_object(path) if path.exists() else {}
    defaults: dict[str, float] = {}
    for name, option in NUMBER_OPTIONS.items():
        if not option.is_models or (value := content.get(name)) is None:
            continue
        if option.kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if name == "top_k" and value == -1:
            value = 0
        is_number = isinstance(value, int if option.kind is int else int | float) and not isinstance(value, bool)
        if not is_number or (fault := option.fault(value)) is not None:
            why = f"{fault}" if is_number else f"{json.dumps(value)[:64]} is no number of its kind"
            raise UnsupportedModel(
                f"{directory.name}/{GENERATION_CONFIG}: {name}: {why} (generation_config=none ignores it)"
            )
        defaults[name] = option.kind(value)
    if content.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def _ids(value: Any, source: str) -> Sequence[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise UnsupportedModel(f"{source} {json.dumps(token_id)} is no token id")
    return ids
