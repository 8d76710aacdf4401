"""Exports a trained head in the EAGLE-3 format."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from training.head import TrainableHead
from training.vocabulary import DraftVocabulary


def export_head(directory: Path, config: dict[str, Any], head: TrainableHead, vocabulary: DraftVocabulary) -> int:
    """Writes config.json and model.safetensors, with weights in bfloat16. Returns the size of the latter in bytes.

    Each file is replaced as a whole.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.to("cpu", torch.bfloat16).contiguous() for name, weight in head.state_dict().items()}
    weights = directory / "model.safetensors.new"
    save_file({**tensors, **vocabulary.tensors()}, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors makes the file readable for its owner only
    os.replace(weights, directory / "model.safetensors")
    text = directory / "config.json.new"
    text.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(text, directory / "config.json")
    return (directory / "model.safetensors").stat().st_size
