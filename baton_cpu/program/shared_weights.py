"""Weights that a program shares with the model's modules, so that no weight is held twice.

A program reads weights from panels (see weights.py). When a weight is packed, the modules that hold it are replaced by
PanelLinears, which read the same panels, and their own copies are freed, weight by weight. A PanelLinear copies its
weight out of the panels at every call, which takes as long as computing some 30 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from baton_cpu.blocks.linear import PackedLinear, linear_silu, linear_times, packed_linear
from baton_cpu.program.kernel.dot_products import PANEL_WIDTH
from common.errors import StartupError
from common.host.memory import require_room, return_freed_memory

PART_BYTES = 16 << 20  # copied at once: malloc keeps as much for the next part, and the system need not clear it again


@dataclass(frozen=True, slots=True)
class PanelRows:
    """A weight [outputs, inputs] inside `panels` [panels, steps, PANEL_WIDTH, inputs of a step], which may hold others.

    A panel has PANEL_WIDTH lanes, and each lane holds the row of one output. This weight uses the lanes from `lanes[0]`
    to `lanes[1]`. If the rows in these lanes are numbered through all panels, one panel after the other, its rows are
    those from `start` to `stop`. Ends are exclusive.
    """

    panels: Tensor
    start: int
    stop: int
    lanes: tuple[int, int] = (0, PANEL_WIDTH)

    @property
    def row_bytes(self) -> int:
        return self.panels[0].nbytes // PANEL_WIDTH

    def parts(self) -> Iterator[Tensor]:
        """Returns copies of the weight's rows, a few at a time, in their order."""
        num_lanes = self.lanes[1] - self.lanes[0]
        panels = self.panels.flatten(2).view(torch.int32)[:, :, slice(*self.lanes)]
        in_part = max(1, PART_BYTES // panels[0].nbytes)
        first, last = self.start // num_lanes, -(-self.stop // num_lanes)
        for begin in range(first, last, in_part):
            end = min(begin + in_part, last)
            rows = panels[begin:end].transpose(1, 2).contiguous().flatten(0, 1).view(self.panels.dtype)
            before = begin * num_lanes
            yield rows[max(self.start - before, 0) : self.stop - before]

    def weight(self) -> Tensor:
        """Returns a copy of the weight."""
        return torch.cat(list(self.parts()))


class PanelLinear(nn.Module):
    """A linear layer whose weight lies in panels. It stands for a layer of class `kind`, which is nn.Linear or
    PackedLinear, and computes the same.
    """

    def __init__(self, rows: PanelRows, bias: Tensor | None, kind: type[nn.Module]) -> None:
        super().__init__()
        self._rows = rows
        self.bias = bias
        self.kind = kind

    @property
    def out_features(self) -> int:
        return self._rows.stop - self._rows.start

    @property
    def weight(self) -> Tensor:
        return self._rows.weight()

    @property
    def weight_bytes(self) -> int:
        return self.out_features * self._rows.row_bytes

    def forward(self, x: Tensor) -> Tensor:
        compute = packed_linear if self.kind is PackedLinear else linear
        return self._joined(lambda weight, bias, _: compute(x, weight, bias))

    def silu(self, x: Tensor) -> Tensor:
        """Returns what `PackedLinear.silu` does."""
        return self._joined(lambda weight, bias, _: linear_silu(x, weight, bias))

    def times(self, other: Tensor, x: Tensor) -> Tensor:
        """Returns what `PackedLinear.times` does."""
        return self._joined(lambda weight, bias, rows: linear_times(x, other[..., rows].contiguous(), weight, bias))

    def on_its_own(self) -> nn.Module:
        """Returns the layer that this one stands for, with a copy of the weight."""
        weight = self.weight
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=self.bias is not None, device="meta")
        plain.weight = nn.Parameter(weight, requires_grad=False)
        if self.bias is not None:
            plain.bias = nn.Parameter(self.bias, requires_grad=False)
        return PackedLinear(plain) if self.kind is PackedLinear else plain

    def _joined(self, compute: Callable[[Tensor, Tensor | None, slice], Tensor]) -> Tensor:
        """Returns the joined outputs of `compute` for all parts of the weight. `compute` gets a part, its biases, and
        the slice of its outputs.
        """
        outputs, start = [], 0
        for part in self._rows.parts():
            rows = slice(start, start + len(part))
            outputs.append(compute(part, None if self.bias is None else self.bias[rows], rows))
            start = rows.stop
        return torch.cat(outputs, dim=-1)


@dataclass(frozen=True, slots=True)
class Holder:
    """The place of a linear layer in a model: attribute `name` of `module`.

    A forward that runs while the layer is replaced computes with the old or the new one.
    """

    module: nn.Module
    name: str

    @property
    def layer(self) -> Any:
        """The layer, an nn.Linear, PackedLinear or PanelLinear. All three have `weight`, `bias` and `out_features`."""
        return self.module.get_submodule(self.name)

    def replace(self, layer: nn.Module) -> None:
        setattr(self.module, self.name, layer)


class SharedWeights:
    """The linear layers that read panels now, until `end` puts back what they were."""

    def __init__(self) -> None:
        self._holders: list[Holder] = []

    def weight_of(self, holders: Sequence[Holder]) -> Tensor:
        """Returns the weights of all `holders` joined, in their order."""
        weights = [holder.layer.weight.detach() for holder in holders]
        return weights[0] if len(weights) == 1 else torch.cat(weights)

    def share(self, panels: Tensor, holders: Sequence[Holder]) -> None:
        """Lets `holders` compute with `panels`, which has the rows of all of them, in their order."""
        start = 0
        for holder in holders:
            stop = start + holder.layer.out_features
            self._replace(holder, PanelRows(panels, start, stop))
            start = stop
        return_freed_memory()

    def share_pair(self, panels: Tensor, first: Holder, second: Holder) -> None:
        """Lets two layers compute with `panels`. The first half of each panel is of `first`, the rest of `second`."""
        half = PANEL_WIDTH // 2
        for holder, lanes in ((first, (0, half)), (second, (half, PANEL_WIDTH))):
            self._replace(holder, PanelRows(panels, 0, holder.layer.out_features, lanes))
        return_freed_memory()

    def end(self, check: Callable[[], None]) -> None:
        """Gives all layers weights of their own again. `check` is called before each layer and may raise.

        The panels may still be in memory. Raises OSError if there is no room besides them: the remaining layers then go
        on reading panels, which is slower.
        """
        while self._holders:
            check()
            holder = self._holders[-1]
            require_room(holder.layer.weight_bytes)
            holder.replace(holder.layer.on_its_own())
            self._holders.pop()

    def _replace(self, holder: Holder, rows: PanelRows) -> None:
        layer = holder.layer
        weight, start = layer.weight, 0
        for part in rows.parts():
            if not torch.equal(part, weight[start : start + len(part)]):
                raise StartupError(f"{holder.name}: its weight was packed wrongly")
            start += len(part)
        kind = layer.kind if isinstance(layer, PanelLinear) else type(layer)
        holder.replace(PanelLinear(rows, None if layer.bias is None else layer.bias.detach(), kind))
        self._holders.append(holder)
