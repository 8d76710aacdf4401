"""Tests that under speculation the schedule side waits for verify only: it prepares the next step before draft-extend
has run.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path

import pytest

from common.device.cpu import CpuDevice
from common.device.scripted import ScriptedDevice
from common.draft.load import load_draft
from common.kv.pool import KvPool
from common.model.loader import load_target
from common.sampling.params import ResolvedSampling
from decode_service.forward.eagle_worker import EagleWorker
from decode_service.forward.worker import OnPublish
from decode_service.schedule.schedule_batch import ScheduleBatch
from tests.support.draft_heads import save_copy_head
from tests.support.pair import InProcessPair, PairOptions

NUM_REQUESTS = 3
NEW_TOKENS = 24


def left_when_prepared(model_dir: Path, head_dir: Path, patch: pytest.MonkeyPatch) -> list[list[str]]:
    """Returns the work left on the forward stream each time a step is prepared while another one is in flight.

    The decode engine's streams run only the work that something waits for.
    """
    target = load_target(model_dir, device="cpu", dtype="float32")
    head = load_draft(head_dir, target=target, device="cpu", dtype="float32")
    target.capture_hidden(head.capture)
    scripted = ScriptedDevice()
    devices = chain([scripted], repeat(CpuDevice(num_threads=1), 1))
    pair = InProcessPair(target, new_device=lambda: next(devices), draft=head, options=PairOptions(num_draft_tokens=2))
    left: list[list[str]] = []
    prepare = ScheduleBatch.prepare_for_decode

    def watched(self: ScheduleBatch, pool: KvPool) -> bool:
        left.append(scripted.stream("forward").pending())
        return prepare(self, pool)

    patch.setattr(ScheduleBatch, "prepare_for_decode", watched)
    for number in range(NUM_REQUESTS):
        sampling = ResolvedSampling(seed=number, max_tokens=NEW_TOKENS, temperature=0.0)
        pair.submit(str(number), [10 + number, 11, 12], sampling)

    def has_ended() -> bool:
        scripted.stream("landing").run_all()
        return all(outcome.has_ended for outcome in pair.outcomes.values())

    pair.run(until=has_ended)
    assert [len(outcome.token_ids) for outcome in pair.outcomes.values()] == [NEW_TOKENS] * NUM_REQUESTS
    scripted.run_all()
    pair.close()
    return [pieces for pieces in left if pieces]


@pytest.fixture
def head_dir(last_token_model_dir: Path, tmp_path: Path) -> Path:
    return save_copy_head(tmp_path, target_dir=last_token_model_dir, family="eagle3")


def test_the_next_step_is_prepared_before_draft_extend_begins(
    last_token_model_dir: Path, head_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = left_when_prepared(last_token_model_dir, head_dir, monkeypatch)
    assert len(left) >= NEW_TOKENS // 3 - 1, "steps did not overlap"
    assert all(pieces[0] == "extend" for pieces in left), left


def test_it_is_seen_when_lengths_are_published_after_draft_extend(
    last_token_model_dir: Path, head_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = EagleWorker.forward

    def late(self: EagleWorker, batch: object, *, on_publish: OnPublish, **keywords: object) -> object:
        held: list[Callable[[], None]] = []
        output = forward(self, batch, on_publish=lambda cell: held.append(lambda: on_publish(cell)), **keywords)  # type: ignore[arg-type]
        for publish in held:
            publish()
        return output

    monkeypatch.setattr(EagleWorker, "forward", late)
    left = left_when_prepared(last_token_model_dir, head_dir, monkeypatch)
    assert left and all("extend" not in pieces for pieces in left)
