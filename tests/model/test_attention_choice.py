"""The kernels for CUDA are refused by name where what compiles them is missing."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from common.errors import StartupError
from common.model.attention import AttentionBackend
from common.model.attention_choice import AttentionKind, new_attention
from common.model.attention_torch import TorchAttention
from common.model.attention_triton import TritonAttention


def choose(kind: AttentionKind = "kernels") -> AttentionBackend:
    return new_attention(
        kind, num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32, torch_device=torch.device("cuda")
    )


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory where programs are looked for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def install(path: Path) -> Path:
    shutil.copy(sys.executable, path)
    return path


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_either_compiler_does(programs: Path, name: str) -> None:
    install(programs / name)
    assert isinstance(choose(), TritonAttention)


def test_the_one_that_cc_names_is_taken_wherever_it_is(
    programs: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(install(tmp_path_factory.mktemp("elsewhere") / "compiler")))
    assert isinstance(choose(), TritonAttention)


def test_another_one_does_not(programs: Path) -> None:
    install(programs / "cc")  # Triton does not look for it
    with pytest.raises(StartupError, match=r"^attention: .*neither gcc nor clang"):
        choose()
    assert isinstance(choose("torch"), TorchAttention)


def test_a_cc_that_is_not_there_is_named(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(programs / "gcc")
    monkeypatch.setenv("CC", "nonesuch")
    with pytest.raises(StartupError, match=r"^attention: .*CC names nonesuch"):
        choose()
