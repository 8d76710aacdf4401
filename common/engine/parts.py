"""Two values that both engines are built from: EngineParts, which they compute with, and the EngineConfig."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.device.stream import Device
from common.draft.head import DraftHead
from common.kv.layer_group import LayerGroupSpec
from common.model.target import TargetModel
from common.priority import DEFAULT_AGEING, Ageing
from common.sampling.state import DrawKernels
from common.telemetry.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The model, the device and the like with which an engine computes.

    `draft` is None if the engine uses no draft head. Tokens are drawn by `draw_kernels`, or by PyTorch's operators
    without them.
    """

    model: TargetModel
    device: Device
    draft: DraftHead | None = None
    draw_kernels: DrawKernels | None = None
    timeline: Timeline = field(default_factory=Timeline)

    @property
    def layer_groups(self) -> list[LayerGroupSpec]:
        """The layers that attend all tokens: the model's, and then the draft head's."""
        return [self.model.layer_group, *([self.draft.layer_group] if self.draft is not None else [])]

    @property
    def num_draft_layers(self) -> int:
        """The number of the draft head's layers, 0 without a head."""
        return 0 if self.draft is None else self.draft.layer_group.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The options of an engine of either kind.

    `overlap=False` finishes each step before the next is scheduled. With `prefix_cache` a prompt begins after its
    longest prefix whose KV an earlier one left in the pool. `ageing` changes priorities while prompts wait.
    """

    overlap: bool = True
    prefix_cache: bool = True
    ageing: Ageing = DEFAULT_AGEING
    debug_checks: bool = False
