"""Keeps compiled kernels in a directory, so that a machine compiles each once and later processes load it."""

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
from baton_cpu.log import NO_LOG, Log

_choosing = threading.Lock()  # held while numba's cache directory, one for the whole process, is changed


class _Cache:
    directory: Path | None = None  # None: kernels are not kept
    log: Log = NO_LOG


def keep_kernels(directory: Path | None, log: Log = NO_LOG) -> None:
    """Sets the directory where `compiled` stores and finds kernels from now on.

    Until this is called, a process compiles kernels for itself alone. It also does so if `directory` is None or cannot
    be written. Failures to read or write are logged to `log`.
    """
    _Cache.directory, _Cache.log = directory, log


def kernels_dir() -> Path | None:
    """Returns the directory that `keep_kernels` set, or None if kernels are not kept."""
    return _Cache.directory


def _key() -> str:
    """Returns a hash of all that compiled kernels depend on: this package's source and path, the compiler, the
    interpreter, the CPU.
    """
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    for source in sorted(package.rglob("*.py")):
        digest.update(source.read_bytes())
    features = llvmlite.binding.get_host_cpu_features().flatten()
    cpu, tag = llvmlite.binding.get_host_cpu_name(), str(sys.implementation.cache_tag)
    for part in (str(package), tag, numba.__version__, llvmlite.__version__, cpu, features):
        digest.update(part.encode())
    return digest.hexdigest()[:20]


_KEY = _key()  # computed at import, from the source that this process runs


def kernels_key() -> str:
    """Returns the hash that names compiled kernels. It changes with the source, the compiler, the interpreter and the
    CPU.
    """
    return _KEY


def compiled(function: Kernel, arguments: Sequence[Any], *, name: str) -> Kernel:
    """Returns `function` as a kernel, compiled for the types of `arguments` or loaded from the directory that
    `keep_kernels` set. The kernel has been called once with `arguments`, so it must be able to compute with them.

    `name` must be unique to this kernel. It must include what the function's source does not show, such as values of
    its closure.
    """
    if _Cache.directory is None:
        return _called(jit(function), arguments)
    directory = _Cache.directory / f"{kernels_key()}-{name}"
    try:
        try:
            return _called(kept_in(directory, function), arguments)
        except OSError:
            raise
        except Exception as error:  # reading a damaged file may raise anything
            _Cache.log.warning("kernels are compiled once more: %r", error)
            _remove(directory)
            return _called(kept_in(directory, function), arguments)
    except OSError as error:  # not writable, a full disk, or another process that removes a damaged one
        _Cache.log.warning("kernels are not kept: %s", error)
        return _called(jit(function), arguments)


def kept_in(directory: Path, function: Kernel) -> Any:
    """Returns `function` as a kernel whose compiled code is kept in `directory`, which is created if needed. The first
    call of each signature (the types of the arguments) loads the code from there, or compiles it and writes it there.

    numba writes files by renaming, so another process finds a whole file or none. Raises OSError if the directory
    cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _choosing:
        before = numba.config.CACHE_DIR  # type: ignore[attr-defined]
        numba.config.CACHE_DIR = str(directory)  # type: ignore[attr-defined]
        try:
            kernel: Any = jit(function, is_kept=True)
        finally:
            numba.config.CACHE_DIR = before  # type: ignore[attr-defined]
    if not Path(kernel.stats.cache_path).is_relative_to(directory):  # numba fell back to a directory of its own
        raise PermissionError(f"{directory} cannot be written")
    return kernel


def _remove(directory: Path) -> None:
    """Removes `directory` with the kernels in it. It is renamed first, so that it disappears at once for other
    processes, which may be about to write there.
    """
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".damaged-", ignore_cleanup_errors=True) as aside:
        directory.rename(Path(aside) / directory.name)


def _called(kernel: Kernel, arguments: Sequence[Any]) -> Kernel:
    kernel(*arguments)
    return kernel
