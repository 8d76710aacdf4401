"""Digests of a model directory: what two services compare before KV moves.

Weights are read whole once; their digests are kept by path, size and modification time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from common.draft.head import DraftHead
from common.draft.seed import seed_columns
from common.errors import UnsupportedModel
from common.model.target import TargetModel
from common.model_cache import default_cache_dir
from common.wire.fingerprint import Fingerprint

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json")
_WITHOUT_EFFECT_ON_KV = frozenset(
    {
        "_name_or_path",
        "architectures",
        "dtype",
        "max_position_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys of a config that may differ: a context limit, the stored dtype (weights and layer groups have theirs), notes."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft head, the directory it came from, and how many first drafts its seeds carry."""

    directory: Path
    head: DraftHead
    topk: int = 1


def compute_fingerprint(
    directory: Path, model: TargetModel, *, draft: LoadedDraft | None = None, cache_dir: Path | None = None
) -> Fingerprint:
    """The fingerprint of the model in `directory` as `model` serves it. UnsupportedModel without weight files.

    A draft head's config is digested with its weights: it says which of the target's states the head reads.
    """
    cache_dir = cache_dir or default_cache_dir()
    fingerprint = Fingerprint(
        config_digest=config_digest(_read_config(directory)),
        target_weights_digest=weights_digest(directory, cache_dir),
        tokenizer_digest=_tokenizer_digest(directory),
        layer_groups=(model.layer_group,),
    )
    if draft is None:
        return fingerprint
    parts = (config_digest(_read_config(draft.directory)), weights_digest(draft.directory, cache_dir))
    return replace(
        fingerprint,
        layer_groups=(model.layer_group, draft.head.layer_group),
        draft_weights_digest=_digest(part.encode() for part in parts),
        algorithm=draft.head.algorithm,
        seed_columns=seed_columns(draft.head, topk=draft.topk),
    )


def _read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def config_digest(config: dict[str, Any]) -> str:
    kept = {key: value for key, value in config.items() if key not in _WITHOUT_EFFECT_ON_KV}
    return _digest([json.dumps(kept, sort_keys=True).encode()])


def weights_digest(directory: Path, cache_dir: Path) -> str:
    """Of the sorted (name, shape, dtype, content) of every tensor, however they are spread over files."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(f"{directory}: no .safetensors file; convert the weights first")
    cache_file = cache_dir / "weight_digests.json"
    cache = _read_cache(cache_file)
    lines: list[str] = []
    is_new = False
    for file in files:
        stat = file.stat()
        version = [stat.st_size, stat.st_mtime_ns]
        entry = cache.get(str(file.resolve()))
        if entry is None or entry["version"] != version:
            entry = {"version": version, "tensors": _tensor_lines(file)}
            cache[str(file.resolve())] = entry
            is_new = True
        lines += entry["tensors"]
    if is_new:
        _write_cache(cache_file, cache)
    return _digest(line.encode() for line in sorted(lines))


def _tensor_lines(file: Path) -> list[str]:
    lines = []
    with safe_open(str(file), framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            tensor = tensors.get_tensor(name)
            content = _digest([memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())])
            lines.append(f"{name} {tuple(tensor.shape)} {tensor.dtype} {content}")
    return lines


def _tokenizer_digest(directory: Path) -> str:
    files = [directory / name for name in _TOKENIZER_FILES if (directory / name).exists()]
    return _digest(part for file in files for part in (file.name.encode(), file.read_bytes()))


def _digest(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _read_cache(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        cache = json.loads(file.read_text())
        if isinstance(cache, dict):
            return cache
    return {}


def _write_cache(file: Path, cache: dict[str, Any]) -> None:
    """A cache that cannot be written costs time at the next start, nothing else."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump(cache, new)
        os.replace(new.name, file)
