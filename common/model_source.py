"""What `model` in the configuration may name, as a model directory on this machine.

demo                 the demo model, made on first use
path/to/directory    as it is
path/to/file.gguf    converted once, kept in the user's cache
owner/name           fetched from the hub, kept in the hub's cache
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from common.config.settings import DEMO_MODEL
from common.demo_model import ensure_demo_model
from common.errors import StartupError
from common.model_cache import Progress, convert_gguf, default_cache_dir, make_once, silent

_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt"]


def resolve_model(spec: str, progress: Progress | None = None, *, dtype: str, cache_dir: Path | None = None) -> Path:
    """A directory with config, safetensors and tokenizer. Raises StartupError when there is none to be had.

    `dtype` is the one a GGUF file is converted to.
    """
    if spec == DEMO_MODEL:
        return ensure_demo_model(progress, cache_dir=cache_dir)
    path = Path(spec).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.suffix == ".gguf":
        return _converted(path, dtype, progress or silent, cache_dir or default_cache_dir())
    return fetch_from_hub(spec, _HUB_FILES, otherwise="a directory, a GGUF file")


def fetch_from_hub(spec: str, patterns: list[str], *, otherwise: str) -> Path:
    """The hub cache's directory for `owner/name`. Raises StartupError; `otherwise`: what else `spec` may name."""
    try:
        return Path(snapshot_download(spec, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise StartupError(f"{spec}: neither {otherwise} nor a model on the hub: {error}") from error


def _converted(gguf: Path, dtype: str, progress: Progress, cache_dir: Path) -> Path:
    try:
        state = gguf.stat()
    except OSError as error:
        raise StartupError(f"{gguf}: {error.strerror}") from error
    gguf = gguf.resolve()
    version = hashlib.sha256(f"{gguf}\n{state.st_size}\n{state.st_mtime_ns}".encode()).hexdigest()[:12]
    path = cache_dir / "models" / f"{gguf.stem}-{dtype}-{version}"
    return make_once(path, lambda _, out: convert_gguf(gguf, out, dtype=dtype, progress=progress), progress)
