"""The training loss of a head and its acceptance, both computed from chains of draft steps over a batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, log_softmax

from training.batches import Batch
from training.head import TrainableHead


class SoftCE(torch.autograd.Function):
    """Cross-entropy of `logits` [N, Vd] against the probabilities `probs` [N, Vd] float32, averaged over N.

    Each row of `probs` sums to 1. The gradient is computed together with the loss, and one buffer in the logits' dtype
    is kept for it: a third of the memory that autograd would keep.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probs: Tensor) -> Tensor:
        ctx.scale = 1 / max(1, logits.shape[0])
        gradient = log_softmax(logits, dim=-1, dtype=torch.float32)
        loss: Tensor = torch.einsum("nv,nv->", probs, gradient) * -ctx.scale
        gradient.exp_().sub_(probs)
        ctx.save_for_backward(gradient.to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        scaled: Tensor = gradient * (grad_output * ctx.scale)
        return scaled, None


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    loss: Tensor = SoftCE.apply(logits, probs)  # type: ignore[no-untyped-call]
    return loss


_STEP_DECAY = 0.8


@dataclass(frozen=True, slots=True)
class ChainAcceptance:
    """How often drafts are right, for each draft step.

    `accuracy` is the share of drafts that are the target's most likely token. `cumulative` is the share of chains that
    are right in this step and all before it.
    """

    accuracy: tuple[float, ...]
    cumulative: tuple[float, ...]

    @property
    def tau(self) -> float:
        """Returns the mean number of tokens per forward of the target, if every chain were verified greedily."""
        return 1 + sum(self.cumulative)


class Objective:
    """Computes the loss and the acceptance of a head.

    `output_rows` [Vd, H] are the target's output layer for the draft vocabulary.
    """

    def __init__(self, head: TrainableHead, embedding: nn.Module, output_rows: Tensor, *, num_steps: int) -> None:
        self._head = head
        self._embedding = embedding
        self._output_rows = output_rows
        self._num_steps = num_steps
        self._weights = [_STEP_DECAY**step for step in range(num_steps)]

    def losses(self, batch: Batch) -> Tensor:
        """Returns the loss of each draft step, [S], averaged over the positions of the batch."""
        with torch.no_grad():
            probs = linear(batch.final.to(self._output_rows.dtype), self._output_rows).float().softmax(-1)
        losses = [
            soft_cross_entropy(self._head.logits(hidden.flatten(0, 1)[batch.rows - step]), probs)
            for step, hidden in enumerate(self._chain(batch))
        ]
        return torch.stack(losses)

    def total(self, losses: Tensor) -> Tensor:
        return losses @ losses.new_tensor(self._weights) / sum(self._weights)

    @torch.no_grad()
    def measure(self, batches: Iterable[Batch]) -> ChainAcceptance:
        """Measures the acceptance over all chains of `batches`. There must be at least one chain."""
        correct = torch.zeros(2, self._num_steps, dtype=torch.int64, device=self._output_rows.device)
        num_chains = 0
        for batch in batches:
            drafted = [
                self._head.logits(hidden.flatten(0, 1)[batch.chain_rows]).argmax(-1) for hidden in self._chain(batch)
            ]
            hits = torch.stack(drafted, dim=1) == batch.chain_ids
            correct += torch.stack([hits.sum(0), hits.cumprod(1).sum(0)])
            num_chains += batch.chain_rows.numel()
        accuracy, cumulative = (correct / num_chains).tolist()
        return ChainAcceptance(tuple(accuracy), tuple(cumulative))

    def _chain(self, batch: Batch) -> Iterable[Tensor]:
        def embedded(step: int) -> Tensor:
            output: Tensor = self._embedding(batch.token_ids[:, 1 + step : 1 + step + batch.length])
            return output

        return self._head.chain(batch.aux, embedded, self._num_steps)
