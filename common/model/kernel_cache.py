"""Kernels for CPUs, compiled once on a machine: kept in a directory, loaded by every process after the first."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import numba

from common.model.cpu_kernel import Kernel, jit

_SOURCES = ("attention_cpu.py", "cpu_kernel.py", "cpu_norm.py", "cpu_numbers.py", "cpu_rotation.py", "fused/*.py")

_log = logging.getLogger(__name__)
_choosing = threading.Lock()  # numba has one directory a process


class _Cache:
    directory: Path | None = None  # of this process


def keep_kernels(directory: Path) -> None:
    """Keep in `directory` what `compiled` compiles from now on. Until then, and where it cannot be written, each
    process compiles for itself.
    """
    _Cache.directory = directory


@cache
def kernels_key() -> str:
    """Names what compiled kernels depend on: their source and where it is, the compiler, the interpreter, the CPU."""
    digest = hashlib.sha256()
    model = Path(__file__).resolve().parent
    for pattern in _SOURCES:
        for source in sorted(model.glob(pattern)):
            digest.update(source.read_bytes())
    features = llvmlite.binding.get_host_cpu_features().flatten()
    cpu, tag = llvmlite.binding.get_host_cpu_name(), str(sys.implementation.cache_tag)
    for part in (str(model), tag, numba.__version__, llvmlite.__version__, cpu, features):
        digest.update(part.encode())
    return digest.hexdigest()[:20]


def compiled(function: Kernel, arguments: Sequence[Any], *, name: str) -> Kernel:
    """`function` as a kernel that has been called with `arguments`, and so is compiled for their types.

    `name` is of nothing else: what the function's source does not say, as its closure's values, must be in it.
    """
    if _Cache.directory is None:
        return _called(jit(function), arguments)
    directory = _Cache.directory / f"{kernels_key()}-{name}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):  # numba would keep them where our names do not tell them apart
            raise PermissionError(f"{directory} cannot be written")
    except OSError as error:
        _log.warning("kernels are not kept: %s", error)
        return _called(jit(function), arguments)
    try:
        return _called(kept_in(directory, function), arguments)
    except Exception as error:  # whatever the reader of what is damaged says
        _log.warning("kernels are compiled once more: %r", error)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(exist_ok=True)
        return _called(kept_in(directory, function), arguments)


def kept_in(directory: Path, function: Kernel) -> Any:
    """`function`, compiled at its first call of each signature, or found in `directory`, where it is left.

    numba writes there by renaming, so another process finds the whole of it or nothing.
    """
    with _choosing:
        before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
        numba.config.CACHE_DIR = str(directory)  # type: ignore[attr-defined]
        try:
            return jit(function, is_kept=True)
        finally:
            numba.config.CACHE_DIR = before  # type: ignore[attr-defined]


def _called(kernel: Kernel, arguments: Sequence[Any]) -> Kernel:
    kernel(*arguments)
    return kernel
