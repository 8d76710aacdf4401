"""Starts a run from a head that was trained before."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from common.errors import ConfigError
from training.vocabulary import UNKNOWN, DraftVocabulary

OUTPUT_LAYER = "lm_head.weight"
_RIDGE = 0.1  # relative to the mean square sum of the inputs


@dataclass(frozen=True, slots=True)
class StartingHead:
    """A trained head from which a run starts.

    `weights` have the names of the EAGLE-3 format. Row i of the output layer belongs to token i of `vocabulary`.
    `digest` is the digest of the weight file.
    """

    weights: dict[str, Tensor]
    vocabulary: DraftVocabulary
    digest: str

    def output_rows(self, vocabulary: DraftVocabulary, target_rows: Tensor) -> Tensor:
        """Returns the output rows [Vd, h] float32 for a new draft vocabulary.

        A token that the head knows keeps its row. The row of a new token is made from the target's row in `target_rows`
        [Vd, h]. Training moves all rows far from the target's, and an unmoved row would be drafted far too often. So
        the target's row is moved in the same way: by the affine map that best fits the moves of the known tokens' rows.
        With few known tokens it is moved less.
        """
        own = torch.from_numpy(self.vocabulary.draft_ids()[vocabulary.token_ids])
        is_known = own != UNKNOWN
        rows = self.weights[OUTPUT_LAYER].float()[own.clamp_min(0)]
        if is_known.all():
            return rows
        target_rows = target_rows.to("cpu", torch.float32)
        moves = _affine_fit(target_rows[is_known], (rows - target_rows)[is_known])
        return torch.where(is_known.unsqueeze(1), rows, target_rows + _with_ones(target_rows) @ moves)


def _affine_fit(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Fits an affine map from `inputs` [N, H] to `outputs` [N, h] by least squares with a small ridge.

    Returns a matrix [H + 1, h], whose last row is the constant.
    """
    bases = _with_ones(inputs).double()
    gram = bases.T @ bases
    ridge = _RIDGE * max(1.0, gram.diagonal().mean().item())
    solution: Tensor = torch.linalg.solve(gram + ridge * torch.eye(len(gram)), bases.T @ outputs.double())
    return solution.float()


def _with_ones(rows: Tensor) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 1), value=1.0)


def read_starting_head(directory: Path, head_config: dict[str, Any]) -> StartingHead:
    """Reads a head as `export_head` writes it. Raises ConfigError unless its config equals `head_config`."""
    path = directory / "model.safetensors"
    try:
        config = json.loads((directory / "config.json").read_text())
        weights = load_file(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"start_from: {directory}: no head to read: {error}") from error
    for key in sorted({*config, *head_config}):
        if config.get(key) != head_config.get(key):
            raise ConfigError(
                f"start_from: {key}: the head in {directory} has {config.get(key)}, this run {head_config.get(key)}"
            )
    offsets = weights.pop("d2t", None)
    weights.pop("t2d", None)
    if offsets is None:
        raise ConfigError(f"start_from: {directory}: the head has no d2t")
    num_rows = weights[OUTPUT_LAYER].shape[0] if OUTPUT_LAYER in weights else 0
    if num_rows != len(offsets):
        raise ConfigError(f"start_from: {directory}: {OUTPUT_LAYER} has {num_rows} rows for {len(offsets)} in d2t")
    token_ids = np.arange(len(offsets)) + offsets.numpy()
    return StartingHead(weights, DraftVocabulary(token_ids, head_config["vocab_size"]), digest)
