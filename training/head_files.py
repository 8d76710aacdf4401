"""The files of a head in the EAGLE-3 format: its config.json, derived from the target's, the export of a trained head,
and the reading of one from which a run starts.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.checkpoints.cache import full_disk_named
from common.draft.formats import read_spec
from common.draft.spec import Eagle3Spec
from common.errors import ConfigError, UnsupportedModel
from common.host.replaced_file import replaced
from training.head import TrainableHead
from training.vocabulary import UNKNOWN, DraftVocabulary

_NEEDED = (
    "num_attention_heads",
    "hidden_size",
    "intermediate_size",
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
)
OUTPUT_LAYER = "lm_head.weight"
_RIDGE = 0.1  # relative to the mean square sum of the inputs


def head_config(target: Any, *, draft_vocab: int, layers: tuple[int, ...] | None) -> dict[str, Any]:
    """Returns the config of a head in the EAGLE-3 format. `target` is a transformers config.

    `layers` are the target's layers whose input the head reads; None means the format's default. Raises
    UnsupportedModel if the target's config lacks a value that a Llama layer needs.
    """
    for key in _NEEDED:
        if getattr(target, key, None) is None:
            raise UnsupportedModel(f"{target.model_type}: a target whose config has no {key} is not supported")
    num_heads = target.num_attention_heads
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": getattr(target, "num_key_value_heads", None) or num_heads,
        "head_dim": getattr(target, "head_dim", None) or target.hidden_size // num_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": getattr(target, "rms_norm_eps", None) or 1e-6,
        "rope_parameters": target.rope_parameters,
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if layers is not None:
        config["eagle_aux_hidden_state_layer_ids"] = list(layers)
    return config


def head_spec(config: dict[str, Any], target: Any, directory: Path) -> Eagle3Spec:
    """Returns the spec of the head, read from its `config` in the same way as the services will read it.

    `target` is the target model's config and `directory` its directory. Raises ConfigError for layers that the target
    does not have, and UnsupportedModel or DraftMismatch, naming `directory`, if the services would not serve such a
    head.
    """
    spec = read_spec(config, (), directory=str(directory), num_target_layers=target.num_hidden_layers)
    assert isinstance(spec, Eagle3Spec)
    if not all(layer < target.num_hidden_layers for layer in spec.captured_layers):
        raise ConfigError(f"layers: {list(spec.captured_layers)} are not all below {target.num_hidden_layers}")
    return spec


def export_head(directory: Path, config: dict[str, Any], head: TrainableHead, vocabulary: DraftVocabulary) -> int:
    """Writes config.json and model.safetensors, with weights in bfloat16. Returns the size of the latter in bytes.

    Each file is replaced as a whole.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.to("cpu", torch.bfloat16).contiguous() for name, weight in head.state_dict().items()}
    file = directory / "model.safetensors"
    with replaced(file) as weights, full_disk_named():
        save_file({**tensors, **vocabulary.tensors()}, weights, metadata={"format": "pt"})
        weights.chmod(0o644)  # safetensors makes the file readable for its owner only
    with replaced(directory / "config.json") as text:
        text.write_text(json.dumps(config, indent=2) + "\n")
    return file.stat().st_size


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
