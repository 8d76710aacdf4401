"""Mutants that break invariant I7: bootstrap, which writes a new row's first token and length into the relay, and
the order between the streams and the schedule side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
from torch import Tensor

from common.device.stream import Event
from decode_service.forward.future_map import FutureMap, RelayPayload
from tests.engine.mutants.kinds import Mutant, arguments_given, instead_of
from tests.support.scripted_device import ScriptedStream

Bootstrap = Callable[[FutureMap, Tensor, Tensor, RelayPayload], None]


def bootstrap_rearms_publish_ready(patch: pytest.MonkeyPatch) -> None:
    bootstrap, given = FutureMap.bootstrap, arguments_given(patch, FutureMap)

    def mutant(self: FutureMap, rows: Tensor, seq_lens: Tensor, payload: RelayPayload) -> None:
        bootstrap(self, rows, seq_lens, payload)
        self.publish_ready = given(self)["forward_stream"].record()

    patch.setattr(FutureMap, "bootstrap", mutant)


def bootstrap_on_another_stream(patch: pytest.MonkeyPatch) -> None:
    """Runs bootstrap (the write of a new row into the relay) on a stream for which no forward waits."""
    bootstrap, given = FutureMap.bootstrap, arguments_given(patch, FutureMap)

    def mutant(self: FutureMap, rows: Tensor, seq_lens: Tensor, payload: RelayPayload) -> None:
        device = given(self)["device"]
        if not any(stream.name == "bootstrap" for stream in device.streams):
            device.new_stream("bootstrap")
        device.stream("bootstrap").enqueue(partial(bootstrap, self, rows, seq_lens, payload))

    patch.setattr(FutureMap, "bootstrap", mutant)


def _bootstrap_leaves(buffers_of: Callable[[FutureMap], Sequence[Tensor]]) -> Mutant:
    @instead_of(FutureMap, "bootstrap")
    def leaves(bootstrap: Bootstrap, self: FutureMap, rows: Tensor, seq_lens: Tensor, payload: RelayPayload) -> None:
        before = [buffer.clone() for buffer in buffers_of(self)]
        bootstrap(self, rows, seq_lens, payload)
        for buffer, values in zip(buffers_of(self), before, strict=True):
            buffer.copy_(values)

    return leaves


def bootstrap_writes_no_lengths(patch: pytest.MonkeyPatch) -> None:
    _bootstrap_leaves(lambda future_map: [future_map.new_seq_lens_buf])(patch)


def bootstrap_writes_no_tokens(patch: pytest.MonkeyPatch) -> None:
    _bootstrap_leaves(lambda future_map: [future_map.output_tokens])(patch)


def bootstrap_writes_no_seeds(patch: pytest.MonkeyPatch) -> None:
    _bootstrap_leaves(lambda future_map: list(future_map.seeds.values()))(patch)


@instead_of(ScriptedStream, "wait")
def forward_ignores_the_schedule_side(wait: Callable[..., None], self: ScriptedStream, event: Event) -> None:
    if self.name != "forward":
        wait(self, event)


@instead_of(ScriptedStream, "wait")
def landing_ignores_the_schedule_side(wait: Callable[..., None], self: ScriptedStream, event: Event) -> None:
    if self.name != "landing":
        wait(self, event)
