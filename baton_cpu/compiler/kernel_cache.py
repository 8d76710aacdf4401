"""Kernels for CPUs, compiled once on a machine: kept in a directory, loaded by every process after the first."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import numba

from baton_cpu.compiler.jit import Kernel, jit
from common.cpu_engine import NO_LOG, Log

_choosing = threading.Lock()  # numba has one directory a process


class _Cache:
    directory: Path | None = None  # of this process
    log: Log = NO_LOG


def keep_kernels(directory: Path | None, log: Log = NO_LOG) -> None:
    """Keep in `directory` what `compiled` compiles from now on. Until then, with None, and where it cannot be written,
    each process compiles for itself. `log` is told of what cannot be read or written.
    """
    _Cache.directory, _Cache.log = directory, log


def kernels_dir() -> Path | None:
    """Where `keep_kernels` said; None: nowhere."""
    return _Cache.directory


def _key() -> str:
    """Of their source and where it is, the compiler, the interpreter, the CPU."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    for source in sorted(package.rglob("*.py")):
        digest.update(source.read_bytes())
    features = llvmlite.binding.get_host_cpu_features().flatten()
    cpu, tag = llvmlite.binding.get_host_cpu_name(), str(sys.implementation.cache_tag)
    for part in (str(package), tag, numba.__version__, llvmlite.__version__, cpu, features):
        digest.update(part.encode())
    return digest.hexdigest()[:20]


_KEY = _key()  # of the source as this process imports it


def kernels_key() -> str:
    """Names what compiled kernels depend on."""
    return _KEY


def compiled(function: Kernel, arguments: Sequence[Any], *, name: str) -> Kernel:
    """`function` as a kernel that has been called with `arguments`, and so is compiled for their types.

    `name` is of nothing else: what the function's source does not say, as its closure's values, must be in it.
    """
    if _Cache.directory is None:
        return _called(jit(function), arguments)
    directory = _Cache.directory / f"{kernels_key()}-{name}"
    try:
        try:
            return _called(kept_in(directory, function), arguments)
        except OSError:
            raise
        except Exception as error:  # whatever the reader of what is damaged says
            _Cache.log.warning("kernels are compiled once more: %r", error)
            _remove(directory)
            return _called(kept_in(directory, function), arguments)
    except OSError as error:  # it cannot be written, the disk is full, another process removes what is damaged
        _Cache.log.warning("kernels are not kept: %s", error)
        return _called(jit(function), arguments)


def kept_in(directory: Path, function: Kernel) -> Any:
    """`function`, compiled at its first call of each signature, or found in `directory`, where it is left.

    numba writes there by renaming, so another process finds the whole of it or nothing. Raises OSError when it cannot
    write there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _choosing:
        before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
        numba.config.CACHE_DIR = str(directory)  # type: ignore[attr-defined]
        try:
            kernel: Any = jit(function, is_kept=True)
        finally:
            numba.config.CACHE_DIR = before  # type: ignore[attr-defined]
    if not Path(kernel.stats.cache_path).is_relative_to(directory):  # there our names do not tell kernels apart
        raise PermissionError(f"{directory} cannot be written")
    return kernel


def _remove(directory: Path) -> None:
    """At once for the others, who may be about to write there."""
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".damaged-", ignore_cleanup_errors=True) as aside:
        directory.rename(Path(aside) / directory.name)


def _called(kernel: Kernel, arguments: Sequence[Any]) -> Kernel:
    kernel(*arguments)
    return kernel
