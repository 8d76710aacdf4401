"""Tests that a decode step waits for the device in two places only: for `publish_ready` and for the end event of a
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from common.device.factory import open_device
from common.draft.load import load_draft
from common.model.loader import load_target
from common.sampling.params import ResolvedSampling
from decode_service.forward.future_map import FutureMap
from decode_service.schedule.schedule_batch import ScheduleBatch
from tests.support.draft_heads import save_copy_head
from tests.support.drafted import SAMPLED, SHAPES
from tests.support.models import save_last_token_model
from tests.support.pair import InProcessPair, PairOptions

pytestmark = pytest.mark.gpu


@pytest.fixture
def refuse_to_wait(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[InProcessPair], None]]:
    """A function that makes synchronising calls in the pair's later decode steps raise. Allowed are only those with
    which the step waits for the lengths and takes them.
    """

    def allowed_to_wait(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def waiting(*arguments: object) -> object:
            torch.cuda.set_sync_debug_mode("default")
            try:
                return method(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("error")

        monkeypatch.setattr(kind, name, waiting)

    def watch(pair: InProcessPair) -> None:
        step = pair.decode.step

        def watched_step(commands: object) -> None:
            try:
                torch.cuda.set_sync_debug_mode("error")
                step(commands)  # type: ignore[arg-type]
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(pair.decode, "step", watched_step)

    allowed_to_wait(FutureMap, "resolve_seq_lens")
    allowed_to_wait(ScheduleBatch, "set_seq_lens")
    yield watch
    torch.cuda.set_sync_debug_mode("default")


def run(pair: InProcessPair) -> None:
    for number, options in enumerate(SAMPLED.values()):
        sampling = ResolvedSampling(seed=number, max_tokens=20, temperature=0.7, **options)
        pair.submit(str(number), [4 + (5 * number + place) % 50 for place in range(3 + 9 * number)], sampling)
    pair.run()
    assert [outcome.error for outcome in pair.outcomes.values()] == [None] * len(SAMPLED)


@pytest.mark.parametrize("replays_forwards", [True, False], ids=["graphs", "no-graphs"])
@pytest.mark.parametrize("shape", [None, "chain-4", "tree-4x3-15"])
def test_a_step_waits_for_nothing_but_lengths(
    shape: str | None, replays_forwards: bool, refuse_to_wait: Callable[[InProcessPair], None], tmp_path: Path
) -> None:
    target_dir = save_last_token_model(tmp_path / "target", logits_std=1.5)
    target = load_target(target_dir, device="cuda", dtype="float32")
    head = None
    if shape is not None:
        head_dir = save_copy_head(tmp_path / "head", target_dir=target_dir, family="eagle3", num_layers=1)
        head = load_draft(head_dir, target=target, device="cuda", dtype="float32")
        target.capture_hidden(head.capture)
    options = PairOptions(
        replays_forwards=replays_forwards, debug_checks=False, **(SHAPES[shape] if shape is not None else {})
    )
    pair = InProcessPair(target, new_device=lambda: open_device("cuda", num_threads=1), draft=head, options=options)
    try:
        run(pair)  # compiles kernels and fills the cache of pinned memory
        pair.outcomes.clear()
        refuse_to_wait(pair)
        run(pair)
    finally:
        pair.close()
