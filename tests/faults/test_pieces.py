"""Tests that the pieces (units of stream work) that a plan may name are exactly those that the engines run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.device.cpu import CpuDevice
from common.device.piece import piece_name
from common.device.stream import Event, MilestoneWork, OnEvent, OnMilestone, Scope, Stream, StreamKind, Work
from common.sampling.params import ResolvedSampling
from tests.faults.device import FaultyDevice, FaultyStream
from tests.faults.injector import Injector
from tests.faults.plan import STREAM_PIECES, FaultPlan
from tests.support.draft_heads import save_copy_head
from tests.support.loading import load_draft, load_target
from tests.support.pair import InProcessPair, PairOptions


class _WatchedStream(FaultyStream):
    def __init__(self, stream: Stream, pieces: set[str]) -> None:
        super().__init__(stream, Injector(FaultPlan()))
        self._pieces = pieces

    def enqueue(self, work: Work, scope: Scope | None = None) -> None:
        self._pieces.add(piece_name(work))
        super().enqueue(work, scope)

    def enqueue_with_milestones(
        self,
        work: MilestoneWork,
        num_milestones: int,
        scope: Scope | None = None,
        on_milestone: OnMilestone | None = None,
    ) -> Sequence[Event]:
        self._pieces.add(piece_name(work))
        return super().enqueue_with_milestones(work, num_milestones, scope, on_milestone)


class _WatchedDevice(FaultyDevice):
    def __init__(self, pieces: dict[str, set[str]]) -> None:
        self._inner = CpuDevice(num_threads=1)
        super().__init__(self._inner, Injector(FaultPlan()))
        self._pieces = pieces

    @property
    def schedule_stream(self) -> Stream:
        return self._watched(self._inner.schedule_stream)

    def new_stream(self, name: str, kind: StreamKind = StreamKind.COMPUTE, on_event: OnEvent | None = None) -> Stream:
        return self._watched(self._inner.new_stream(name, kind, on_event))

    def _watched(self, stream: Stream) -> Stream:
        return _WatchedStream(stream, self._pieces[stream.name])


@pytest.mark.parametrize("speculates", [False, True])
def test_the_engines_run_the_pieces_that_a_plan_may_name(
    last_token_model_dir: Path, tmp_path: Path, speculates: bool
) -> None:
    target = load_target(last_token_model_dir, device="cpu", dtype="float32")
    draft = None
    if speculates:
        head_dir = save_copy_head(tmp_path, target_dir=last_token_model_dir, family="eagle3")
        draft = load_draft(head_dir, target=target, device="cpu", dtype="float32")
        target.capture_hidden(draft.capture)
    pieces: dict[str, set[str]] = defaultdict(set)
    pair = InProcessPair(target, new_device=lambda: _WatchedDevice(pieces), draft=draft, options=PairOptions())
    pair.submit("0", [10, 11, 12], ResolvedSampling(seed=1, max_tokens=12, temperature=1.0))
    pair.run()
    pair.close()
    ran = {name: names for name, names in pieces.items() if names}
    of_the_other = set() if speculates else {"draft", "publish_lengths", "read"}
    assert ran == {name: names - of_the_other for name, names in STREAM_PIECES.items()}
