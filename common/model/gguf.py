"""GGUF files through transformers, always as plain dense weights.

`python -m common.model.gguf FILE DIRECTORY DTYPE` converts a file to a model directory.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers


def convert_gguf(path: Path, out_dir: Path, dtype: torch.dtype) -> None:
    """Write the model in `path` to `out_dir`: safetensors in `dtype`, config, generation config, tokenizer."""
    directory = str(path.parent)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=path.name, dtype=dtype, **_dequantised()
    )
    if hasattr(model.config, "quantization_config"):  # the weights are dense now: the saved config must say so
        del model.config.quantization_config
    model.save_pretrained(str(out_dir))
    tokenizer.save_pretrained(str(out_dir))


def _dequantised() -> dict[str, Any]:
    """Newer transformers would keep the blocks packed where a kernel package is installed."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]), getattr(torch, sys.argv[3]))
