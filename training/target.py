"""The frozen target model for training a draft head: it gives hidden states, the embedding and the output layer.

One of its layers can initialise the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.checkpoints.cache import default_cache_dir
from common.checkpoints.digest import weights_digest
from common.errors import UnsupportedModel
from common.model.loader import load_model


@dataclass(frozen=True, slots=True)
class FrozenTarget:
    """The target model, frozen and in bfloat16. `digest` is the digest of its weights."""

    directory: Path
    model: Any
    digest: str

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def embedding(self) -> nn.Module:
        module: nn.Module = self.model.get_input_embeddings()
        return module

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """Returns the output layer's rows [N, H] for N tokens."""
        rows: Tensor = self.model.get_output_embeddings().weight[token_ids]
        return rows

    @torch.inference_mode()
    def states(self, token_ids: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Runs the target. Returns the inputs of `layers`, concatenated [B, L, layers * H], and the final norm's output
        [B, L, H].

        `token_ids` [B, L] may be padded at the end.
        """
        output = self.model.base_model(input_ids=token_ids, use_cache=False, output_hidden_states=True)
        entering = torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)
        return entering, output.last_hidden_state

    @torch.inference_mode()
    def argmax(self, final: Tensor) -> Tensor:
        """Returns the most likely next tokens [N] for outputs [N, H] of the final norm."""
        token_ids: Tensor = self.model.get_output_embeddings()(final).argmax(-1)
        return token_ids

    def last_layer(self) -> dict[str, Tensor]:
        """Returns the weights of the last decoder layer. The keys are names within the layer.

        Returns an empty dictionary if the model does not keep its layers in `model.layers`.
        """
        prefix = f"model.layers.{self.config.num_hidden_layers - 1}."
        tensors: dict[str, Tensor] = self.model.state_dict()
        return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

    def final_norm(self) -> Tensor | None:
        """Returns the weight [H] of the final norm, or None if the norm is not `model.norm`."""
        weight: Tensor | None = self.model.state_dict().get("model.norm.weight")
        return weight


def load_target(directory: Path, *, device: str) -> FrozenTarget:
    """Loads the target. Raises UnsupportedModel for a model that the services would not serve, or whose files are
    damaged.
    """
    files, model = load_model(directory, dtype=torch.bfloat16, attention="sdpa")
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise UnsupportedModel(f"{directory.name}: an output layer with a bias is not supported")
    model = model.to(device).eval().requires_grad_(False)
    target = FrozenTarget(directory, model, weights_digest(files.weight_files, default_cache_dir()))
    _require_plain_logits(target)
    return target


@torch.inference_mode()
def _require_plain_logits(target: FrozenTarget) -> None:
    """Raises UnsupportedModel if the model changes its output layer's logits, for example scales or caps them.

    The loss would be wrong for such a model.
    """
    token_ids = torch.tensor([[0, 1]], device=target.model.device)
    theirs = target.model(input_ids=token_ids, use_cache=False).logits.float()
    _, final = target.states(token_ids, (0,))
    ours = target.model.get_output_embeddings()(final).float()
    if not torch.allclose(ours, theirs, rtol=0.0, atol=0.02 * float(theirs.abs().max())):
        raise UnsupportedModel(f"{target.directory.name}: logits that are not the output layer's are not supported")
