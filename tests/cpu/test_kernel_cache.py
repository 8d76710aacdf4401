"""Kernels compiled by an earlier process are loaded instead of compiled again."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba.core.caching import InTreeCacheLocator

from baton_cpu import attention
from baton_cpu.blocks import norm, rotation
from baton_cpu.compiler import kernel_cache
from baton_cpu.compiler.jit import Kernel
from baton_cpu.compiler.kernel_cache import compiled, keep_kernels


class Log(list[str]):
    def warning(self, event: str, *values: object) -> None:
        self.append(event % values)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def directory(tmp_path: Path, log: Log) -> Iterator[Path]:
    before = kernel_cache._Cache.directory
    keep_kernels(tmp_path / "kernels", log)
    yield tmp_path / "kernels"
    keep_kernels(before)


def adding(number: int) -> Kernel:
    def add(numbers):  # type: ignore[no-untyped-def]
        for i in range(numbers.shape[0]):
            numbers[i] += number

    return add


def added(number: int) -> tuple[int, bool]:
    """Returns what the kernel gives for 0, and whether the kernel was loaded from the cache."""
    numbers = np.zeros(1, np.int64)
    kernel: Any = compiled(adding(number), (np.zeros(1, np.int64),), name=f"add-{number}")
    kernel(numbers)
    assert kernel.stats.cache_hits.total() + kernel.stats.cache_misses.total() == 1
    return int(numbers[0]), bool(kernel.stats.cache_hits)


def check_not_kept(log: Log) -> None:
    """Asserts that a kernel works without a cache, and that no file was written."""
    numbers = np.zeros(1, np.int64)
    kernel: Any = compiled(adding(3), (numbers.copy(),), name="add")
    assert any("not kept" in line for line in log) and not kernel.stats.cache_path
    kernel(numbers)
    assert numbers[0] == 3


def test_what_was_compiled_is_loaded(directory: Path) -> None:
    assert added(3) == (3, False)
    assert added(3) == (3, True)


def test_names_tell_kernels_of_one_source_apart(directory: Path) -> None:
    assert added(3) == (3, False)
    assert added(4) == (4, False)
    assert added(3) == (3, True) and added(4) == (4, True)


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_what_is_damaged_is_compiled_again(directory: Path, suffix: str, log: Log) -> None:
    added(3)
    (kept,) = directory.rglob(f"*.{suffix}")
    kept.write_bytes(kept.read_bytes()[:-9])
    assert added(3) == (3, False)
    assert any("compiled once more" in line for line in log)
    assert added(3) == (3, True)


def test_where_nothing_can_be_kept_each_process_compiles(directory: Path, log: Log) -> None:
    directory.write_text("in the way")
    check_not_kept(log)


def test_one_whose_disk_is_full_compiles_for_itself(directory: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numba.core.caching.os.replace", full)
    check_not_kept(log)


def test_numbas_other_directories_are_not_used(directory: Path, monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    """If our directory is not writable, for example on a read-only disk, numba would use its other directories."""
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [InTreeCacheLocator])
    check_not_kept(log)


def test_the_kernels_of_a_model_are_kept(directory: Path) -> None:
    """The next process loads the kernels. numba's cache must not regard the Python values that they close over as new
    each time.
    """
    for is_loaded in (False, True):
        kernels: list[Any] = [
            attention._compiled.__wrapped__(2, 2, 8, torch.bfloat16, torch.bfloat16),
            norm._compiled.__wrapped__(torch.bfloat16),
            rotation._compiled.__wrapped__(torch.bfloat16),
        ]
        assert [bool(kernel.stats.cache_hits) for kernel in kernels] == [is_loaded] * 3
        assert [bool(kernel.stats.cache_misses) for kernel in kernels] == [not is_loaded] * 3
