"""Tests that the fingerprints of two model directories are equal if both compute the same KV, and otherwise differ in
the field that says why.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.checkpoints.digest import LoadedDraft, compute_fingerprint, weights_digest
from common.errors import StartupError
from common.model.loader import KvDtype
from common.wire.fingerprint import Fingerprint, first_difference
from tests.support.draft_heads import save_eagle3_head
from tests.support.loading import load_draft, load_target
from tests.support.models import save_tiny_model

YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0}
LLAMA3_WITHOUT_ITS_LENGTH = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 10000.0,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", "qwen2")


def fingerprint(directory: Path, *, dtype: str = "float32", kv_dtype: KvDtype = "auto") -> Fingerprint:
    model = load_target(directory, device="cpu", dtype=dtype, kv_dtype=kv_dtype)
    return compute_fingerprint(directory, model, protocol_version=1, cache_dir=directory.parent / "cache")


def change_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def change_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def negate_a_norm(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][0] *= -1


def differing_field(before: Fingerprint, directory: Path) -> str | None:
    """Returns the field in which the directory's model differs now, or None."""
    difference = first_difference(before, fingerprint(directory))
    return None if difference is None else difference[0]


def test_the_same_model_has_the_same_fingerprint_wherever_it_is(directory: Path, tmp_path: Path) -> None:
    assert differing_field(fingerprint(directory), save_tiny_model(tmp_path / "elsewhere", "qwen2")) is None


def rotate_otherwise(config: dict[str, Any]) -> None:
    config["rope_parameters"]["rope_theta"] = 500.0


CHANGES: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "a weight": (lambda path: change_weights(path, negate_a_norm), "target_weights_digest"),
    "the rotation's base": (lambda path: change_json(path / "config.json", rotate_otherwise), "config_digest"),
    "the context limit": (
        lambda path: change_json(path / "config.json", lambda config: config.update(max_position_embeddings=128)),
        None,
    ),
    "tokenizer.json": (
        lambda path: change_json(path / "tokenizer.json", lambda tokenizer: tokenizer["model"]["merges"].pop()),
        "tokenizer_digest",
    ),
    **{
        name: (lambda path, name=name: (path / name).write_bytes(b"{}"), "tokenizer_digest")
        for name in ("spiece.model", "vocab.txt", "added_tokens.json")
    },
    "weights that are not loaded": (
        lambda path: save_file({"other": torch.ones(3)}, path / "consolidated.safetensors"),
        None,
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_in_its_field_if_kv_depends_on_it(change: str, directory: Path) -> None:
    before = fingerprint(directory)
    apply, field = CHANGES[change]
    apply(directory)
    assert differing_field(before, directory) == field


def test_how_tensors_are_spread_over_files_does_not_matter(directory: Path, tmp_path: Path) -> None:
    whole = weights_digest([directory / "model.safetensors"], tmp_path / "cache")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    names = list(tensors)
    save_file({name: tensors[name] for name in names[3:]}, directory / "model-1.safetensors")
    save_file({name: tensors[name] for name in names[:3]}, directory / "model-2.safetensors")
    shards = [directory / "model-1.safetensors", directory / "model-2.safetensors"]
    assert weights_digest(shards, tmp_path / "cache") == whole


def test_a_tensor_in_another_dtype_is_another_tensor(directory: Path, tmp_path: Path) -> None:
    before = weights_digest([directory / "model.safetensors"], tmp_path / "cache")

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()

    change_weights(directory, narrow)
    assert weights_digest([directory / "model.safetensors"], tmp_path / "cache") != before


@pytest.mark.parametrize("rope", [YARN, LLAMA3_WITHOUT_ITS_LENGTH], ids=["yarn", "llama3"])
def test_a_context_limit_that_the_rotation_follows_is_a_difference(rope: dict[str, object], directory: Path) -> None:
    change_json(directory / "config.json", lambda config: config.update(rope_parameters=rope))
    before = fingerprint(directory)
    change_json(directory / "config.json", lambda config: config.update(max_position_embeddings=128))
    assert differing_field(before, directory) == "config_digest"


def test_another_transformers_is_seen_and_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(directory)
    monkeypatch.setattr("common.checkpoints.digest.transformers.__version__", "5.0.1")
    difference = first_difference(before, fingerprint(directory))
    assert difference is not None
    assert difference[0] == "config_digest" and "5.0.1" in difference[2]


def test_a_tokenizer_file_that_comes_later_makes_no_difference(directory: Path) -> None:
    before = fingerprint(directory)
    model = load_target(directory, device="cpu", dtype="float32")
    (directory / "vocab.txt").write_text("later")
    after = compute_fingerprint(directory, model, protocol_version=1, cache_dir=directory.parent / "cache")
    assert first_difference(before, after) is None


def test_a_tokenizer_file_that_is_a_directory_is_named(directory: Path) -> None:
    (directory / "merges.txt").mkdir()
    with pytest.raises(StartupError, match=r"model/merges\.txt: .*[Dd]irectory"):
        fingerprint(directory)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_the_dtype_it_runs_in_is_compared_whatever_that_of_its_kv_is(directory: Path, kv_dtype: KvDtype) -> None:
    ours, theirs = (fingerprint(directory, dtype=dtype, kv_dtype=kv_dtype) for dtype in ("float32", "bfloat16"))
    assert first_difference(ours, theirs) == ("dtype", "float32", "bfloat16")


def test_the_dtype_of_its_kv_is_that_of_the_layer_group(directory: Path) -> None:
    difference = first_difference(fingerprint(directory), fingerprint(directory, kv_dtype="fp8_e4m3"))
    assert difference == ("layer_groups[target].dtype", "float32", "float8_e4m3fn")


def test_weights_of_the_same_size_and_time_are_seen(directory: Path) -> None:
    before, file = fingerprint(directory), directory / "model.safetensors"
    stat = file.stat()
    change_weights(directory, negate_a_norm)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert differing_field(before, directory) == "target_weights_digest"


@pytest.mark.parametrize(
    "file", ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_file_that_changed_after_it_was_loaded_ends_the_start(file: str, directory: Path) -> None:
    model = load_target(directory, device="cpu", dtype="float32")
    if file.endswith(".json"):
        change_json(directory / file, lambda content: content.update(added=True))
    else:
        change_weights(directory, negate_a_norm)
    with pytest.raises(StartupError, match=f"{file}: changed while it was read"):
        compute_fingerprint(directory, model, protocol_version=1, cache_dir=directory.parent / "cache")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_file_of_the_head_that_changed_after_it_was_loaded_ends_the_start(
    file: str, directory: Path, tmp_path: Path
) -> None:
    head_dir = save_eagle3_head(tmp_path / "head", target_dir=directory)
    model = load_target(directory, device="cpu", dtype="float32")
    draft = LoadedDraft(load_draft(head_dir, target=model, device="cpu", dtype="float32"))
    if file == "config.json":
        change_json(head_dir / file, lambda config: config.update(rms_norm_eps=0.5))
    else:
        change_weights(head_dir, lambda tensors: tensors["norm.weight"].neg_())
    with pytest.raises(StartupError, match=f"head/{file}: changed while it was read"):
        compute_fingerprint(directory, model, protocol_version=1, draft=draft, cache_dir=tmp_path / "cache")


def test_a_file_that_the_head_is_not_loaded_from_makes_no_difference(directory: Path, tmp_path: Path) -> None:
    head_dir = save_eagle3_head(tmp_path / "head", target_dir=directory)
    model = load_target(directory, device="cpu", dtype="float32")
    draft = LoadedDraft(load_draft(head_dir, target=model, device="cpu", dtype="float32"))
    before = compute_fingerprint(directory, model, protocol_version=1, draft=draft, cache_dir=tmp_path / "cache")
    save_file({"other": torch.ones(3)}, head_dir / "later.safetensors")
    after = compute_fingerprint(directory, model, protocol_version=1, draft=draft, cache_dir=tmp_path / "cache")
    assert first_difference(before, after) is None


def test_a_file_is_read_again_only_when_its_size_or_time_changed(directory: Path, tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    digest = weights_digest([directory / "model.safetensors"], cache_dir)
    remembered = cache_dir / "weight_digests.json"
    change_json(remembered, lambda cache: [entry.update(tensors=["remembered"]) for entry in cache.values()] and None)
    assert weights_digest([directory / "model.safetensors"], cache_dir) != digest
    (directory / "model.safetensors").touch()
    assert weights_digest([directory / "model.safetensors"], cache_dir) == digest


ENTRIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "null": lambda entry: None,
    "text": lambda entry: "x",
    "of-no-version": lambda entry: {"tensors": entry["tensors"]},
    "of-another-version": lambda entry: {"version": 2, "tensors": ["a"]},
    "without-tensors": lambda entry: {"version": entry["version"]},
    "tensors-of-null": lambda entry: {**entry, "tensors": None},
    "tensors-of-text": lambda entry: {**entry, "tensors": "abc"},
    "tensors-of-numbers": lambda entry: {**entry, "tensors": [1, 2]},
    "no-tensors": lambda entry: {**entry, "tensors": []},
    "what-is-no-text": lambda entry: {**entry, "tensors": ["\ud800"]},
}


@pytest.mark.parametrize("kind", ENTRIES)
def test_a_cache_of_another_form_is_read_anew(kind: str, directory: Path, tmp_path: Path) -> None:
    files, remembered = [directory / "model.safetensors"], tmp_path / "cache" / "weight_digests.json"
    digest = weights_digest(files, tmp_path / "cache")
    content = json.loads(remembered.read_text())
    remembered.write_text(json.dumps({file: ENTRIES[kind](entry) for file, entry in content.items()}))
    assert weights_digest(files, tmp_path / "cache") == digest
    assert json.loads(remembered.read_text()) == content


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"7", b"[" * 100_000])
def test_a_cache_of_garbage_is_written_anew(content: bytes, directory: Path, tmp_path: Path) -> None:
    files, remembered = [directory / "model.safetensors"], tmp_path / "cache" / "weight_digests.json"
    digest = weights_digest(files, tmp_path / "cache")
    remembered.write_bytes(content)
    assert weights_digest(files, tmp_path / "cache") == digest
