"""A target model whose forwards fail when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common.attention.backend import ForwardInput
from common.model.forward_program import OnLayerKv
from common.model.target import TargetModel, TargetOutput


class ForwardFailed(Exception):
    """Raised by a forward that was told to fail."""


class FaultyTarget(TargetModel):
    """Wraps a target model. Before every forward it calls `fails` on the stream that runs the forward. If that returns
    True, the forward fails.
    """

    def __init__(self, sound: TargetModel) -> None:
        self._sound = sound
        self._followers = None
        self._part = None
        self.attention = sound.attention
        self.forward_counts = sound.forward_counts
        self.layer_group = sound.layer_group
        self.windows = sound.windows
        self.hidden_size = sound.hidden_size
        self.vocab_size = sound.vocab_size
        self.max_context_tokens = sound.max_context_tokens
        self.eos_token_ids = sound.eos_token_ids
        self.dtype = sound.dtype
        self.torch_device = sound.torch_device
        self.fails: Callable[[ForwardInput], bool] = lambda batch: False

    @property
    def num_layers_begun(self) -> int:
        return self._sound.num_layers_begun

    @property
    def runs_program(self) -> bool:
        return self._sound.runs_program

    def prepare(self, batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> Callable[[], TargetOutput]:
        return partial(self.forward, batch, on_layer_kv=on_layer_kv)

    def forward(self, batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> TargetOutput:
        if self.fails(batch):
            raise ForwardFailed("planted")
        return self._sound.forward(batch, on_layer_kv=on_layer_kv)


def is_decode(batch: ForwardInput) -> bool:
    return batch.extend_lens is None


class FailsFirst:
    """A predicate of batches that is True for the first batch for which `where` is True."""

    def __init__(self, where: Callable[[ForwardInput], bool]) -> None:
        self._where = where
        self._is_over = False

    def __call__(self, batch: ForwardInput) -> bool:
        if self._is_over or not self._where(batch):
            return False
        self._is_over = True
        return True
