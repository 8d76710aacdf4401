"""What `draft` in the configuration may name, as a directory with config.json and safetensors on this machine.

demo                 the EAGLE-3 head that comes with Baton, for the demo model
path/to/directory    as it is; with .bin files only, converted once, kept in the user's cache
owner/name           fetched from the hub, likewise
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from common.config.settings import DEMO_MODEL
from common.errors import StartupError
from common.model_cache import Progress, default_cache_dir, make_once, silent
from common.model_source import fetch_from_hub

_DEMO_HEAD = Path(__file__).parent / "heads" / "SmolLM2-135M-Instruct-eagle3"
_BIN_FILES = "pytorch_model*.bin"


def resolve_draft(spec: str, progress: Progress | None = None, *, cache_dir: Path | None = None) -> Path:
    """A directory for `load_draft`. Raises StartupError when there is none to be had."""
    if spec == DEMO_MODEL:
        return _DEMO_HEAD
    directory = Path(spec).expanduser()
    if directory.is_dir():
        directory = directory.resolve()
    else:
        directory = fetch_from_hub(spec, ["*.safetensors", "*.json"], otherwise="a directory")
        if not any(directory.glob("*.safetensors")):
            directory = fetch_from_hub(spec, [_BIN_FILES, "*.json"], otherwise="a directory")
    if any(directory.glob("*.safetensors")) or not any(directory.glob(_BIN_FILES)):
        return directory
    return _converted(directory, progress or silent, cache_dir or default_cache_dir())


def _converted(directory: Path, progress: Progress, cache_dir: Path) -> Path:
    files = sorted(directory.glob(_BIN_FILES))
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    version = hashlib.sha256(f"{directory}\n{states}".encode()).hexdigest()[:12]

    def convert(_: Path, out: Path) -> None:
        progress(f"converting {directory.name} to safetensors", 0, 0)
        for file in files:
            save_file(_read(file), out / f"{file.stem}.safetensors")
        for file in directory.glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)

    return make_once(cache_dir / "drafts" / f"{directory.name}-{version}", convert, progress)


def _read(file: Path) -> dict[str, Tensor]:
    """Tensors only: no code in the file is run."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise StartupError(f"{file}: not a file of tensors: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise StartupError(f"{file}: not a file of tensors by name")
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
