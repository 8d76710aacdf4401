"""Finds the tokens that end a model's output: all that its generation config, config and tokenizer name.

Defaults of the config's class are ignored, because they belong to another checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import UnsupportedModel
from common.model.model_files import CONFIG, GENERATION_CONFIG, read_object
from common.sampling.params import MAX_END_TOKEN_IDS

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


def _ids(value: Any, source: str) -> Sequence[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise UnsupportedModel(f"{source} {json.dumps(token_id)} is no token id")
    return ids
