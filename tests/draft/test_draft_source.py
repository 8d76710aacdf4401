"""Tests of the values that the setting `draft` accepts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from common.checkpoints import source
from common.checkpoints.source import check_draft, resolve_draft
from common.errors import StartupError


def save_bin(directory: Path, content: object) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    torch.save(content, directory / "pytorch_model.bin")
    return directory


def test_a_directory_with_safetensors_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = save_bin(tmp_path / "head", {"fc.weight": torch.ones(2)})
    (directory / "model.safetensors").touch()
    assert resolve_draft(str(directory), cache_dir=tmp_path / "cache") == directory


def test_bin_files_are_converted_once(tmp_path: Path) -> None:
    """The files also contain tensors that share memory, as published heads do."""
    weight = torch.arange(6.0).view(2, 3)
    directory = save_bin(tmp_path / "head", {"fc.weight": weight, "lm_head.weight": weight.T, "d2t": torch.arange(4)})
    stages: list[str] = []

    def resolve() -> Path:
        return resolve_draft(str(directory), lambda stage, *_: stages.append(stage), cache_dir=tmp_path / "cache")

    converted = resolve()
    assert resolve() == converted
    assert len(stages) == 1
    tensors = load_file(converted / "pytorch_model.safetensors")
    torch.testing.assert_close(tensors["lm_head.weight"], weight.T)
    assert tensors["d2t"].tolist() == [0, 1, 2, 3]
    assert (converted / "config.json").read_text() == "{}"


def test_a_disk_that_a_conversion_fills_is_told_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    directory = save_bin(tmp_path / "head", {"fc.weight": torch.ones(2)})
    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(StartupError, match=r"^[^\n]* cannot be made: No space left on device [^\n]*$"):
        resolve_draft(str(directory), cache_dir=tmp_path / "cache")


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("run",)


@pytest.mark.parametrize("content", [Evil(), {"fc.weight": Evil()}, [torch.ones(1)], {"state": {}}])
def test_bin_files_with_anything_but_tensors_are_refused(content: object, tmp_path: Path) -> None:
    directory = save_bin(tmp_path / "head", content)
    with pytest.raises(StartupError, match=r"^draft: .*pytorch_model\.bin: not a file of tensors.*would fit$"):
        resolve_draft(str(directory), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("content", [b"", b"no tensors", b"PK\x03\x04", b"\x80\x02", b"\x80\x02."])
def test_bin_files_that_are_broken_are_refused_in_a_line(content: bytes, tmp_path: Path) -> None:
    directory = save_bin(tmp_path / "head", {})
    (directory / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(StartupError, match=r"^draft: .*pytorch_model\.bin: not a file of tensors.*would fit$"):
        resolve_draft(str(directory), cache_dir=tmp_path / "cache")


def test_from_the_hub_bin_files_are_fetched_only_where_there_is_nothing_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def fetch(setting: str, spec: str, patterns: list[str], *, kinds: str) -> Path:
        asked.append(patterns)
        return save_bin(tmp_path / "bin", {"a": torch.ones(1)}) if "pytorch_model*.bin" in patterns else tmp_path

    monkeypatch.setattr(source, "fetch_from_hub", fetch)
    directory = resolve_draft("owner/name", cache_dir=tmp_path / "cache")
    assert [path.name for path in directory.glob("*.safetensors")] == ["pytorch_model.safetensors"]
    assert [("pytorch_model*.bin" in patterns, "*.safetensors" in patterns) for patterns in asked] == [
        (False, True),
        (True, False),
    ]


@pytest.mark.parametrize("spec", ["no/such/directory", "/no/such/directory"])
def test_what_does_not_exist_is_an_error_that_names_it(spec: str) -> None:
    for look in (check_draft, resolve_draft):
        with pytest.raises(StartupError, match=f"^draft: {spec}: there is no such file or directory$"):
            look(spec)


def test_the_head_of_the_demo_model_comes_along_with_its_card() -> None:
    directory = resolve_draft("demo")
    assert {path.name for path in directory.iterdir()} == {"README.md", "config.json", "curve.png", "model.safetensors"}
    assert sum(path.stat().st_size for path in directory.iterdir()) < 20e6
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in directory.iterdir()), "not everyone may read it"
