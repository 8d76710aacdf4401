"""A target that replays its forwards from recorded graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.kv.layer_group import LayerGroupSpec
from common.model.forward_graphs import ForwardGraphs
from common.model.target import Target, TargetOutput


class GraphedTarget(Target):
    """Wraps a Target so that forwards of recorded shapes are replayed. A later replay may overwrite the results of an
    earlier one: the docstring of `ForwardGraphs.run` says when.
    """

    def __init__(self, target: Target, graphs: ForwardGraphs) -> None:
        self._target = target
        self._graphs = graphs

    @property
    def layer_group(self) -> LayerGroupSpec:
        return self._target.layer_group

    @property
    def hidden_size(self) -> int:
        return self._target.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self._target.dtype

    @property
    def torch_device(self) -> torch.device:
        return self._target.torch_device

    @torch.inference_mode()
    def forward(self, batch: ForwardInput) -> TargetOutput:
        logits, *hidden = self._graphs.run("target", self._forward, batch)
        return TargetOutput(logits, hidden[0] if hidden else None)

    def prepare(self, batch: ForwardInput) -> Callable[[], TargetOutput]:
        return partial(self.forward, batch)

    def _forward(self, batch: ForwardInput, beside: Tensor | None) -> tuple[Tensor, ...]:
        output = self._target.forward(batch)
        return (output.logits,) if output.hidden is None else (output.logits, output.hidden)
