"""The optimisers: Muon for the matrices of the decoder layer, AdamW for norms and the output layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer

from training.config import TrainConfig
from training.head import TrainableHead

_WEIGHT_DECAY = 0.01
_MAX_GRADIENT_NORM = 0.5


class Optimizers:
    def __init__(self, head: TrainableHead, config: TrainConfig) -> None:
        self._weights = list(head.parameters())
        matrices = head.matrices()
        by_muon = {id(weight) for weight in matrices}
        others = [weight for weight in self._weights if id(weight) not in by_muon]
        self._parts: list[tuple[Optimizer, float]] = [
            (
                Muon(
                    matrices,
                    lr=config.muon_lr,
                    momentum=0.95,
                    weight_decay=_WEIGHT_DECAY,
                    adjust_lr_fn="match_rms_adamw",
                ),
                config.muon_lr,
            ),
            (AdamW(others, lr=config.lr, betas=(0.9, 0.95), weight_decay=_WEIGHT_DECAY, fused=True), config.lr),
        ]

    def step(self, factor: float) -> None:
        """Clips the gradients, applies them with the learning rates times `factor`, and clears them."""
        torch.nn.utils.clip_grad_norm_(self._weights, _MAX_GRADIENT_NORM)
        for optimizer, rate in self._parts:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer, _ in self._parts]

    def load_state(self, states: list[dict[str, Any]]) -> None:
        for (optimizer, _), state in zip(self._parts, states, strict=True):
            optimizer.load_state_dict(state)
