"""Digests of a model directory, which two services compare before they exchange KV.

A loaded model holds exactly what its files hold (see common/model/model_files.py), so a digest of the files is one of
the model. Weights are read once as a whole; their digests are cached by path and version of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import transformers

from common.checkpoints.cache import default_cache_dir
from common.draft.paged_head import PagedHead
from common.draft.seed import seed_columns
from common.model.model_files import TOKENIZER_FILES, FileVersion, ModelFiles, model_faults
from common.model.stored_tensor import STORED_DTYPES, StoredTensor, read_header
from common.model.target import TargetModel
from common.wire.fingerprint import Fingerprint

_WITHOUT_EFFECT_ON_KV = frozenset(
    {
        "_name_or_path",
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Config keys that may differ between services: notes, and the stored dtype. The served dtype is a separate field."""
_NUM_THREADS = 4  # that digest weights at the same time
_DIGEST_BYTES = 16
_CONTEXT_LIMIT = "max_position_embeddings"
_WITHOUT_LIMIT = frozenset({"default", "linear", "llama3"})
"""Types of rope that do not depend on the context limit. With these the context limit may differ too."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft head with its setting `topk`: the number of candidates for the first draft token in a draft seed.

    A draft seed is the state from which the next draft begins.
    """

    head: PagedHead
    topk: int = 1


def compute_fingerprint(
    directory: Path,
    model: TargetModel,
    *,
    protocol_version: int,
    draft: LoadedDraft | None = None,
    cache_dir: Path | None = None,
) -> Fingerprint:
    """Returns the fingerprint of `model`, which was loaded from `directory`, and of its draft head, if it has one.

    A draft head's config is digested with its weights, because it says which of the target's states the head reads.
    Raises StartupError if a file of either has changed since it was loaded.
    """
    cache_dir = cache_dir or default_cache_dir()
    assert model.files is not None, "a model that was not loaded from files has no fingerprint"
    fingerprint = Fingerprint(
        protocol_version=protocol_version,
        config_digest=config_digest(_read_config(directory), rotation=model.rotation),
        target_weights_digest=weights_digest(model.files.weight_files, cache_dir),
        tokenizer_digest=_tokenizer_digest(model.files),
        dtype=str(model.dtype).removeprefix("torch."),
        layer_groups=model.layer_groups,
    )
    model.files.check_unchanged()
    if draft is None:
        return fingerprint
    files = draft.head.files
    parts = (config_digest(_read_config(files.directory)), weights_digest(files.weight_files, cache_dir))
    files.check_unchanged()
    return replace(
        fingerprint,
        layer_groups=(*model.layer_groups, draft.head.layer_group),
        draft_weights_digest=_digest(part.encode() for part in parts),
        algorithm=draft.head.algorithm,
        seed_columns=seed_columns(draft.head, topk=draft.topk),
    )


def _read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def config_digest(config: dict[str, Any], *, rotation: str = "") -> str:
    """Returns a digest of a config, without the keys that do not affect KV.

    The digest begins with the version of transformers, because transformers fills in absent fields and contains the
    model's code. `rotation` follows, the name of the rotation that the served context chose (see rotation.py).
    """
    is_free = _rope_types(config.get("rope_parameters")) | _rope_types(config.get("rope_scaling")) <= _WITHOUT_LIMIT
    left_out = _WITHOUT_EFFECT_ON_KV | ({_CONTEXT_LIMIT} if is_free else set())
    kept = {key: value for key, value in config.items() if key not in left_out}
    digest = _digest([json.dumps(kept, sort_keys=True).encode()])
    return "-".join(part for part in ("transformers", transformers.__version__, rotation, digest) if part)


def _rope_types(rope: object) -> set[object]:
    """Returns the rope types in `rope`, which has rope parameters, or a dictionary of them for each type of layer."""
    if not isinstance(rope, dict):
        return set()
    own = {rope[key] for key in ("rope_type", "type") if isinstance(rope.get(key), str)}
    if "llama3" in own and rope.get("original_max_position_embeddings") is None:
        own.add("llama3 of no length")
    return own.union(*map(_rope_types, rope.values()))


def weights_digest(files: Sequence[Path], cache_dir: Path) -> str:
    """Returns a digest of all tensors' names, shapes, dtypes and contents. It does not depend on how `files` divide
    them.
    """
    cache_file = cache_dir / "weight_digests.json"
    cache = _read_cache(cache_file)
    lines: list[str] = []
    is_new = False
    for file in files:
        key, version = str(file.resolve()), list(astuple(FileVersion.of(file)))
        of_file = _remembered(cache.get(key), version)
        if of_file is None:
            of_file, is_new = _tensor_lines(file), True
            cache[key] = {"version": version, "tensors": of_file}
        lines += of_file
    if is_new:
        _write_cache(cache_file, cache)
    return _digest(line.encode() for line in sorted(lines))


def _remembered(entry: object, version: list[int]) -> list[str] | None:
    """Returns what `_tensor_lines` gave for this version of a file, if the cache entry has it.

    `version` has the values of a FileVersion. Returns None if the entry is of another version, or malformed.
    """
    lines = entry.get("tensors") if isinstance(entry, dict) and entry.get("version") == version else None
    if not isinstance(lines, list) or not lines:
        return None
    return lines if all(isinstance(line, str) and line.isascii() for line in lines) else None


def _tensor_lines(file: Path) -> list[str]:
    tensors = read_header(file)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        contents = threads.map(_content_digest, tensors.values())
        return [
            f"{name} {stored.shape} {STORED_DTYPES[stored.dtype]} {content}"
            for (name, stored), content in zip(tensors.items(), contents, strict=True)
        ]


def _content_digest(stored: StoredTensor) -> str:
    digest = hashlib.blake2b(stored.num_bytes.to_bytes(8, "little"), digest_size=_DIGEST_BYTES)  # as by _digest
    for part in stored.parts():
        digest.update(part)
    return digest.hexdigest()


def _tokenizer_digest(files: ModelFiles) -> str:
    """Returns a digest of the tokenizer files that existed when the tokenizer was loaded.

    Raises UnsupportedModel if one of them is not a file.
    """
    parts: list[bytes] = []
    for file in (files.directory / name for name in TOKENIZER_FILES):
        if file in files.versions:
            with model_faults(f"{files.directory.name}/{file.name}"):
                parts += [file.name.encode(), file.read_bytes()]
    return _digest(parts)


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _read_cache(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        cache = json.loads(file.read_text())
        if isinstance(cache, dict):
            return cache
    return {}


def _write_cache(file: Path, cache: dict[str, Any]) -> None:
    """Writes the cache, and ignores failure, which costs only time at the next start."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Services that start together write at the same time, so each has a new file of its own.
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump(cache, new)
        os.replace(new.name, file)
