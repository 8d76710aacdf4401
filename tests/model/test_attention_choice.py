"""Tests that CUDA kernels are refused at start if the tools that compile them are missing, and that the error names
what is missing.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from common.attention.backend import AttentionBackend, AttentionOfGroups
from common.attention.choice import AttentionKind, new_attention, new_draw_kernels
from common.attention.torch_attention import TorchAttention
from common.attention.triton_attention import TritonAttention
from common.errors import StartupError
from common.sampling.triton_draws import TritonDraws

CUDA = torch.device("cuda")
A100, B200, GEFORCE = 166912, 232448, 101376
"""Bytes of shared memory that one kernel program may use on each of these GPUs."""


def choose(
    kind: AttentionKind = "kernels",
    *,
    head_dim: int = 64,
    num_heads: int = 4,
    dtype: torch.dtype = torch.float32,
    shared_bytes: int = A100,
) -> AttentionBackend:
    return new_attention(
        kind,
        num_heads=num_heads,
        num_kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        torch_device=CUDA,
        shared_bytes=lambda device: shared_bytes,
        overlaps=lambda device: False,
    )


def test_kernels_of_all_groups_are_compiled_and_each_shape_once() -> None:
    shapes = AttentionOfGroups(choose("torch"), [choose(), choose(head_dim=256)]).kernel_shapes()
    assert shapes and sorted(shapes, key=str) == sorted(choose().kernel_shapes(), key=str)


@pytest.mark.parametrize("kinds", [("kernels", "torch"), ("torch", "kernels"), ("kernels", "kernels")])
def test_attention_follows_lengths_if_that_of_all_groups_does(kinds: tuple[AttentionKind, AttentionKind]) -> None:
    full, of_window = map(choose, kinds)
    assert AttentionOfGroups(full, [of_window]).follows_lengths == ("torch" not in kinds)


def check_kernels_are_refused(named: str) -> None:
    """Asserts that the kernels for attention and for sampling are both refused with an error that matches `named`, and
    that operators are accepted.
    """
    with pytest.raises(StartupError, match=f"^attention: .*{named}.*torch needs nothing$") as of_attention:
        choose()
    with pytest.raises(StartupError) as of_draws:
        new_draw_kernels("kernels", torch_device=CUDA)
    assert str(of_draws.value) == str(of_attention.value)
    assert isinstance(choose("torch"), TorchAttention)
    assert new_draw_kernels("torch", torch_device=CUDA) is None


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory. Programs are looked up in it and nowhere else."""
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
    check_kernels_are_refused("neither gcc nor clang")


def test_a_cc_that_is_not_there_is_named(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(programs / "gcc")
    monkeypatch.setenv("CC", "nonesuch")
    check_kernels_are_refused("CC names nonesuch")


@pytest.mark.parametrize(
    ("head_dim", "num_heads", "dtype"), [(512, 4, torch.bfloat16), (256, 4, torch.float16), (256, 4, torch.float32)]
)
def test_tiles_are_smaller_where_there_is_less_shared_memory(head_dim: int, num_heads: int, dtype: torch.dtype) -> None:
    small, large = (
        choose(head_dim=head_dim, num_heads=num_heads, dtype=dtype, shared_bytes=limit) for limit in (81920, A100)
    )
    assert isinstance(small, TritonAttention) and isinstance(large, TritonAttention)
    sizes = [backend.tiles(64).shared_bytes(head_dim, dtype.itemsize) for backend in (small, large)]
    assert sizes[0] <= 81920 < sizes[1]


def test_a_build_for_other_devices_that_are_called_cuda_is_named(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(programs / "gcc")
    assert isinstance(new_draw_kernels("kernels", torch_device=CUDA), TritonDraws)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    check_kernels_are_refused("NVIDIA.*AMD")


def test_operators_draw_where_they_attend_and_on_cpus(programs: Path) -> None:
    install(programs / "gcc")
    assert new_draw_kernels("torch", torch_device=CUDA) is None
    assert new_draw_kernels("kernels", torch_device=torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("head_dim", "num_heads", "dtype", "shared_bytes"),
    [
        (1024, 4, torch.float32, A100),
        (512, 128, torch.float32, A100),
        (512, 4, torch.float32, 65536),
        (1024, 4, torch.bfloat16, GEFORCE),
        (256, 256, torch.float16, GEFORCE),
        (128, 142, torch.float32, B200),
    ],
)
def test_heads_that_do_not_fit_into_shared_memory_or_registers_are_named(
    head_dim: int, num_heads: int, dtype: torch.dtype, shared_bytes: int
) -> None:
    named = f"heads of {head_dim} numbers.* in {str(dtype).removeprefix('torch.')} .*{shared_bytes} bytes.*torch"
    with pytest.raises(StartupError, match=named):
        choose(head_dim=head_dim, num_heads=num_heads, dtype=dtype, shared_bytes=shared_bytes)
    torch_attention = choose("torch", head_dim=head_dim, num_heads=num_heads, dtype=dtype, shared_bytes=shared_bytes)
    assert isinstance(torch_attention, TorchAttention)
