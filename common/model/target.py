"""A loaded target model: what the engines call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from common.kv.layer_group import LayerGroupSpec
from common.model.attention import AttentionBackend, ForwardInput


class TargetModel:
    """A decoder-only model whose KV lives in a pool shaped by `layer_group`.

    `forward` is called from one thread at a time. `eos_token_ids` are the ids after which the model is done.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        backend: AttentionBackend,
        layer_group: LayerGroupSpec,
        vocab_size: int,
        max_context_tokens: int,
        eos_token_ids: tuple[int, ...],
        dtype: torch.dtype,
        torch_device: torch.device,
    ) -> None:
        self._model = model
        self._backend = backend
        self.layer_group = layer_group
        self.vocab_size = vocab_size
        self.max_context_tokens = max_context_tokens
        self.eos_token_ids = eos_token_ids
        self.dtype = dtype
        self.torch_device = torch_device

    @torch.inference_mode()
    def forward(self, batch: ForwardInput) -> Tensor:
        """Compute the batch's tokens, write their KV to `batch.kv`, return logits [R, vocab] float32.

        On CUDA everything is enqueued on the current stream and nothing waits for it.
        """
        every_token: int | Tensor = 0
        output: Any = self._model(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=every_token if batch.logits_rows is None else batch.logits_rows,
            attention_plan=self._backend.plan(batch),
        )
        logits: Tensor = output.logits
        return logits[0].float()
