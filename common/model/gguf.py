"""GGUF files through transformers, always as plain dense weights.

`python -m common.model.gguf FILE DIRECTORY` converts a file to a model directory.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def gguf_arguments(path: Path) -> dict[str, Any]:
    """Keyword arguments of `from_pretrained(path.parent, ...)` for a model: dequantised while it loads."""
    config = getattr(transformers, "GgufConfig", None)
    arguments: dict[str, Any] = {"gguf_file": path.name}
    if config is not None:  # newer transformers would else keep the blocks where a kernel package is installed
        arguments["quantization_config"] = config(dequantize=True)
    return arguments


def drop_quantization(config: Any) -> None:
    """The weights are dense now: a saved config must not say otherwise."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config


def convert_gguf(path: Path, out_dir: Path) -> None:
    """Write the model in `path` to `out_dir`: bfloat16 safetensors, config, generation config, tokenizer."""
    directory = str(path.parent)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **gguf_arguments(path))
    drop_quantization(model.config)
    model.save_pretrained(str(out_dir))
    tokenizer.save_pretrained(str(out_dir))


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
