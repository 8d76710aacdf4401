"""Finds the sampling options that a model's generation config recommends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from transformers import GenerationConfig

from common.errors import UnsupportedModel
from common.model.model_files import GENERATION_CONFIG, read_object
from common.sampling.params import NUMBER_OPTIONS

_OPTIONS = {name: option for name, option in NUMBER_OPTIONS.items() if hasattr(GenerationConfig(), name)}
"""The options that transformers has by the same name, which generation_config.json may therefore set."""


def read_sampling_defaults(directory: Path) -> Mapping[str, float]:
    """Returns the options that generation_config.json names, by name. Options that are null count as absent.

    As for transformers, `do_sample: false` means greedy, whatever the temperature, and a whole number may be written as
    50.0. A `top_p` of 0 leaves the likeliest token, so it means greedy too. A `top_k` of -1 means all tokens, as in
    other servers; transformers refuses it.

    Raises UnsupportedModel, which names file and field, for a value that a request could not have either.
    """
    path = directory / GENERATION_CONFIG
    content = read_object(path) if path.exists() else {}
    defaults: dict[str, float] = {}
    is_greedy = content.get("do_sample") is False
    for name, option in _OPTIONS.items():
        if (value := content.get(name)) is None:
            continue
        if option.kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if name == "top_k" and value == -1:
            value = 0
        if name == "top_p" and value == 0 and not isinstance(value, bool):
            is_greedy = True
            continue
        is_number = isinstance(value, int if option.kind is int else int | float) and not isinstance(value, bool)
        if not is_number or (fault := option.fault(value)) is not None:
            why = f"{fault}" if is_number else f"{json.dumps(value)[:64]} is no number of its kind"
            raise UnsupportedModel(
                f"{directory.name}/{GENERATION_CONFIG}: {name}: {why} (generation_config=none ignores it)"
            )
        defaults[name] = option.kind(value)
    if is_greedy:
        defaults["temperature"] = 0.0
    return defaults
