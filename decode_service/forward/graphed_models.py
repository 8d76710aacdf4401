"""A target and a draft head whose forwards are recorded as graphs (on CUDA: CUDA graphs) and replayed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.draft.head import DraftHead, DraftOutput, output_of
from common.kv.layer_group import LayerGroupSpec
from common.model.capture import HiddenCapture
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


class GraphedHead(DraftHead):
    """A DraftHead that runs the forwards of another one through `ForwardGraphs`, which replays recorded shapes.

    Results of `forward` are valid only for a limited time: see `ForwardGraphs.run`.
    """

    def __init__(self, head: DraftHead, graphs: ForwardGraphs) -> None:
        self._head = head
        self._graphs = graphs

    @property
    def algorithm(self) -> str:
        return self._head.algorithm

    @property
    def layer_group(self) -> LayerGroupSpec:
        return self._head.layer_group

    @property
    def dtype(self) -> str:
        return self._head.dtype

    @property
    def capture(self) -> HiddenCapture:
        return self._head.capture

    @property
    def hidden_size(self) -> int:
        return self._head.hidden_size

    @property
    def token_ids(self) -> Tensor:
        return self._head.token_ids

    @property
    def feeds_target_hidden(self) -> bool:
        return self._head.feeds_target_hidden

    def fuse(self, captured: Tensor) -> Tensor:
        return self._head.fuse(captured)

    @torch.inference_mode()
    def forward(self, batch: ForwardInput, hidden: Tensor, *, layer: int = 0) -> Tensor:
        (output,) = self._graphs.run(f"draft layer {layer}", partial(self._forward, layer), batch, hidden)
        return output

    def logits(self, hidden: Tensor, *, layer: int = 0) -> Tensor:
        return self._head.logits(hidden, layer=layer)

    def extend(self, batch: ForwardInput, captured: Tensor) -> DraftOutput:
        return output_of(self, batch, self.fuse(captured))

    def step(self, batch: ForwardInput, hidden: Tensor) -> DraftOutput:
        return output_of(self, batch, hidden)

    def _forward(self, layer: int, batch: ForwardInput, hidden: Tensor | None) -> tuple[Tensor, ...]:
        assert hidden is not None
        return (self._head.forward(batch, hidden, layer=layer),)
