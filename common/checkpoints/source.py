"""Resolves the settings `model` and `draft` to local directories, each with config.json and safetensors.

model  demo                 the demo model, made on first use
       path/to/directory    used as it is
       path/to/file.gguf    converted once, kept in the user's cache
       owner/name           fetched from the hub, kept in the hub's cache
draft  demo                 the EAGLE-3 head that comes with Baton, for the demo model
       path/to/directory    used as it is; if it has only .bin files, they are converted once, into the user's cache
       owner/name           fetched from the hub, and converted in the same way
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils._validators import validate_repo_id

from common.checkpoints.cache import (
    CONVERSION,
    OnProgress,
    convert_gguf,
    default_cache_dir,
    full_disk_named,
    make_once,
    silent,
)
from common.checkpoints.demo_model import ensure_demo_model
from common.config.settings import DEMO_MODEL
from common.errors import StartupError

if TYPE_CHECKING:  # finding a head does not need torch
    from torch import Tensor

_GGUF = ".gguf"
_MODEL_KINDS = "a directory or a GGUF file"
_HEAD_KINDS = "a directory"
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt"]
_BIN_FILES = "pytorch_model*.bin"
_FITS = "a head's tensors by name and nothing else, or .safetensors files, would fit"
_DEMO_HEAD = Path(__file__).parent / "heads" / "SmolLM2-135M-Instruct-eagle3"


def check_model(spec: str) -> None:
    """Raises StartupError if `spec` cannot be a value of `model`. It is fast and does not use the network."""
    if spec != DEMO_MODEL:
        _require_config("model", spec, _local_path("model", spec, kinds=_MODEL_KINDS, suffix=_GGUF))


def resolve_model(spec: str, progress: OnProgress | None = None, *, dtype: str, cache_dir: Path | None = None) -> Path:
    """Returns a directory with config, safetensors and tokenizer. A GGUF file is converted to `dtype`.

    Raises StartupError if there is no such model.
    """
    if spec == DEMO_MODEL:
        return ensure_demo_model(progress, cache_dir=cache_dir)
    path = _local_path("model", spec, kinds=_MODEL_KINDS, suffix=_GGUF)
    if path is None:
        return fetch_from_hub("model", spec, _HUB_FILES, kinds=_MODEL_KINDS)
    if path.is_dir():
        return path
    return _converted_gguf(path, dtype, progress or silent, cache_dir or default_cache_dir())


def _require_config(setting: str, spec: str, path: Path | None) -> None:
    """Raises StartupError if `path` is a directory without config.json. Its contents are checked when it is loaded."""
    if path is None or not path.is_dir() or (config := path / "config.json").is_file():
        return
    if config.is_symlink():
        raise StartupError(f"{setting}: {spec}: its config.json is a link to {os.readlink(config)}, which is not there")
    raise StartupError(f"{setting}: {spec}: is a directory without config.json")


def _local_path(setting: str, spec: str, *, kinds: str, suffix: str | None = None) -> Path | None:
    """Returns the local directory, or the file with `suffix`, that `spec` names. Returns None if neither exists, but
    `spec` has the form of a hub id.

    Otherwise raises StartupError; its message begins with `setting`. `kinds` describes, in the message, what `spec` may
    name. No file is accepted if `suffix` is None.
    """
    path = Path(os.path.expanduser(spec))
    try:
        mode = path.stat().st_mode if spec else 0
    except (FileNotFoundError, NotADirectoryError):
        mode = 0
    except (OSError, ValueError) as error:
        raise StartupError(f"{setting}: {spec}: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISDIR(mode) or (stat.S_ISREG(mode) and path.suffix == suffix):
        return path.resolve()
    if mode:
        raise StartupError(f"{setting}: {spec}: is not {kinds}")
    if path.suffix == suffix:
        raise StartupError(f"{setting}: {spec}: there is no such file")
    try:
        validate_repo_id(spec)
    except HFValidationError:
        raise StartupError(f"{setting}: {spec}: there is no such file or directory") from None
    return None


def fetch_from_hub(setting: str, spec: str, patterns: list[str], *, kinds: str) -> Path:
    """Fetches those files of the hub id `spec` whose names match `patterns`. Returns their directory in the cache.

    Raises StartupError; `kinds` describes, in its message, what else `spec` could have named.
    """
    about = f"{setting}: {spec}: "
    try:
        return Path(snapshot_download(spec, allow_patterns=patterns))
    except GatedRepoError as error:
        raise StartupError(f"{about}the hub wants to be asked for access to it, and HF_TOKEN to be set") from error
    except RepositoryNotFoundError as error:
        raise StartupError(
            f"{about}is not {kinds} here, and the hub has no such model, or a private one that HF_TOKEN must open"
        ) from error
    except LocalEntryNotFoundError as error:
        raise StartupError(
            f"{about}is not {kinds} here, and the hub cannot be reached to fetch it: {_why_not_reached(error)}"
        ) from error
    except Exception as error:  # the possible errors, of HTTP client or disk, are not documented
        raise StartupError(f"{about}could not be fetched from the hub: {_first_line(error)}") from error


def _why_not_reached(error: BaseException) -> str:
    """Describes the original error, which is the first of the exception chain."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return "HF_HUB_OFFLINE is set" if isinstance(error, OfflineModeIsEnabled) else _first_line(error)


def _first_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _converted_gguf(gguf: Path, dtype: str, progress: OnProgress, cache_dir: Path) -> Path:
    state = gguf.stat()
    version = hashlib.sha256(f"{gguf}\n{state.st_size}\n{state.st_mtime_ns}\n{CONVERSION}".encode()).hexdigest()[:12]
    path = cache_dir / "models" / f"{gguf.stem}-{dtype}-{version}"
    return make_once(path, lambda _, out: convert_gguf(gguf, out, dtype=dtype, progress=progress), progress)


def check_draft(spec: str) -> None:
    """Raises StartupError if `spec` cannot be a value of `draft`. It is fast and does not use the network."""
    if spec != DEMO_MODEL:
        _require_config("draft", spec, _local_path("draft", spec, kinds=_HEAD_KINDS))


def resolve_draft(spec: str, progress: OnProgress | None = None, *, cache_dir: Path | None = None) -> Path:
    """Returns the directory of the draft head that `spec`, a value of `draft`, names. `load_draft` loads it from there.

    Converted files go into `cache_dir`, by default the user's cache; `progress` is told of the conversion. Raises
    StartupError if there is no such head.
    """
    if spec == DEMO_MODEL:
        return _DEMO_HEAD
    directory = _local_path("draft", spec, kinds=_HEAD_KINDS)
    if directory is None:
        directory = fetch_from_hub("draft", spec, ["*.safetensors", "*.json"], kinds=_HEAD_KINDS)
        if not any(directory.glob("*.safetensors")):
            directory = fetch_from_hub("draft", spec, [_BIN_FILES, "*.json"], kinds=_HEAD_KINDS)
    if any(directory.glob("*.safetensors")) or not any(directory.glob(_BIN_FILES)):
        return directory
    return _converted_bin(directory, progress or silent, cache_dir or default_cache_dir())


def _converted_bin(directory: Path, progress: OnProgress, cache_dir: Path) -> Path:
    files = sorted(directory.glob(_BIN_FILES))
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    version = hashlib.sha256(f"{directory}\n{states}".encode()).hexdigest()[:12]

    def convert(_: Path, out: Path) -> None:
        from safetensors.torch import save_file

        progress(f"converting {directory.name} to safetensors", 0, 0)
        for file in files:
            tensors = _read_bin(file)
            with full_disk_named():
                save_file(tensors, out / f"{file.stem}.safetensors")
        for file in directory.glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)

    return make_once(cache_dir / "drafts" / f"{directory.name}-{version}", convert, progress)


def _read_bin(file: Path) -> dict[str, Tensor]:
    """Returns the tensors in a PyTorch file (.bin), by name, without running any code in the file.

    Raises StartupError if the file holds anything else.
    """
    import torch
    from torch import Tensor

    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise any
        # PyTorch's own words about a pickle are several lines, which say how to run the code in it.
        why = "" if isinstance(error, pickle.UnpicklingError) else f": {_first_line(error)}"
        raise StartupError(f"draft: {file}: not a file of tensors{why}; {_FITS}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise StartupError(f"draft: {file}: not a file of tensors by name; {_FITS}")
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
