"""Resolves the setting `draft` to a local directory with config.json and safetensors.

demo                 the EAGLE-3 head that comes with Baton, for the demo model
path/to/directory    used as it is; if it has only .bin files, they are converted once, into the user's cache
owner/name           fetched from the hub, and converted in the same way
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from common.checkpoints.cache import OnProgress, default_cache_dir, make_once, silent
from common.checkpoints.source import fetch_from_hub, local_path, require_config
from common.config.settings import DEMO_MODEL
from common.errors import StartupError

if TYPE_CHECKING:  # finding a head does not need torch
    from torch import Tensor

_DEMO_HEAD = Path(__file__).parent / "heads" / "SmolLM2-135M-Instruct-eagle3"
_BIN_FILES = "pytorch_model*.bin"
_KINDS = "a directory"


def check_draft(spec: str) -> None:
    """Raises StartupError if `spec` cannot be a value of `draft`. It is fast and does not use the network."""
    if spec != DEMO_MODEL:
        require_config("draft", spec, local_path("draft", spec, kinds=_KINDS))


def resolve_draft(spec: str, progress: OnProgress | None = None, *, cache_dir: Path | None = None) -> Path:
    """Returns the directory of the draft head that `spec`, a value of `draft`, names. `load_draft` loads it from there.

    Converted files go into `cache_dir`, by default the user's cache; `progress` is told of the conversion. Raises
    StartupError if there is no such head.
    """
    if spec == DEMO_MODEL:
        return _DEMO_HEAD
    directory = local_path("draft", spec, kinds=_KINDS)
    if directory is None:
        directory = fetch_from_hub("draft", spec, ["*.safetensors", "*.json"], kinds=_KINDS)
        if not any(directory.glob("*.safetensors")):
            directory = fetch_from_hub("draft", spec, [_BIN_FILES, "*.json"], kinds=_KINDS)
    if any(directory.glob("*.safetensors")) or not any(directory.glob(_BIN_FILES)):
        return directory
    return _converted(directory, progress or silent, cache_dir or default_cache_dir())


def _converted(directory: Path, progress: OnProgress, cache_dir: Path) -> Path:
    files = sorted(directory.glob(_BIN_FILES))
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    version = hashlib.sha256(f"{directory}\n{states}".encode()).hexdigest()[:12]

    def convert(_: Path, out: Path) -> None:
        from safetensors.torch import save_file

        progress(f"converting {directory.name} to safetensors", 0, 0)
        for file in files:
            save_file(_read(file), out / f"{file.stem}.safetensors")
        for file in directory.glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)

    return make_once(cache_dir / "drafts" / f"{directory.name}-{version}", convert, progress)


def _read(file: Path) -> dict[str, Tensor]:
    """Returns the tensors in a PyTorch file (.bin), by name, without running any code in the file.

    Raises StartupError if the file holds anything else.
    """
    import torch
    from torch import Tensor

    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise StartupError(f"{file}: not a file of tensors: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise StartupError(f"{file}: not a file of tensors by name")
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
