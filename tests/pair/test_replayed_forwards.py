"""Tests that recording the forwards of decode steps and replaying them changes no token, and that every step is
replayed (field rule E7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client import CollectorRegistry
from torch import Tensor

from common.config.settings import DecodeSettings
from common.device.stream import GraphWork
from common.draft.head import DraftHead
from common.engine import EngineParts
from common.errors import StartupError
from common.kv.pool_size import PoolSize
from common.model.target import TargetModel
from common.role import Role
from common.sampling.params import ResolvedSampling
from common.service.process import Process
from common.service.roles import RoleSwitch
from common.service.runtime import Runtime
from decode_service import main as decode_main
from tests.support.drafted import SAMPLED, SHAPES, Drafted, assert_same
from tests.support.engines import Received
from tests.support.loading import load_target
from tests.support.pair import InProcessPair, PairOptions
from tests.support.recording_device import CalledGraph, RecordingCpuDevice

# Batch sizes 1, 2, 4 and 5 are recorded. A step has these forwards: the target's, one of the head for each further
# draft, and draft-extend, in which the head reads as many tokens as the step can commit at most.
NUM_SIZES = 4
BOUND_S = 20.0
CASES = [
    ("guessing", None, 1),  # the target
    ("guessing", "chain-4", 2 + 1 + 2),  # verify with and without drafts; drafting; draft-extend likewise
    # as above, drafting level by level
    pytest.param("guessing", "tree-4x3-15", 2 + 2 + 2, marks=pytest.mark.thorough),
    # all drafts come from draft-extend, layer by layer
    pytest.param("guessing_layers", "chain-5", 2 + 2 * 5, marks=pytest.mark.thorough),
]


@contextmanager
def recording_pair(
    target: TargetModel, draft: DraftHead | None, shape: str | None, *, replays: bool
) -> Iterator[tuple[InProcessPair, list[RecordingCpuDevice]]]:
    devices: list[RecordingCpuDevice] = []

    def new_device() -> RecordingCpuDevice:
        devices.append(RecordingCpuDevice())
        return devices[-1]

    options = PairOptions(decode_rows=5, replays_forwards=replays, **(SHAPES[shape] if shape else {}))
    pair = InProcessPair(target, new_device=new_device, draft=draft, options=options)
    try:
        yield pair, devices
        pair.settle()
    finally:
        pair.close()


def run(pair: InProcessPair) -> None:
    """Runs requests of different lengths, so that the number of rows varies. Some of them are sampled."""
    for number, options in enumerate(SAMPLED.values()):
        sampling = ResolvedSampling(
            seed=number, max_tokens=4 + 3 * number, temperature=0.7 if number % 2 else 0.0, **options
        )
        pair.submit(str(number), [4 + (5 * number + place) % 50 for place in range(2 + 5 * number)], sampling)
    pair.run()


def test_a_backend_that_pays_for_the_bound_on_lengths_has_nothing_recorded(
    tiny_model_dir: Callable[[str], Path],
) -> None:
    """A recorded forward assumes that rows are as long as possible, which would make such a backend slow."""
    target = load_target(tiny_model_dir("llama"), device="cpu", dtype="float32", attention="torch")
    with recording_pair(target, None, None, replays=True) as (pair, devices):
        assert pair.decode.recorded is None and not any(device.recorder.graphs for device in devices)


def test_a_model_that_cannot_be_recorded_is_refused_by_the_setting_that_asks_for_it(
    tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(self: CalledGraph, work: GraphWork) -> tuple[Tensor, ...]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(CalledGraph, "record", record)
    target = load_target(tiny_model_dir("llama"), device="cpu", dtype="float32")
    device = RecordingCpuDevice()
    runtime = SimpleNamespace(parts=EngineParts(model=target, device=device), cpu_engine=None)
    size = PoolSize(max_rows=2, max_kv_tokens=64, max_window_tokens=0, max_context_tokens=64, decided_by="the test")
    process = Process(
        instance_id="here",
        runtime=cast(Runtime, runtime),
        registry=CollectorRegistry(),
        switch=RoleSwitch([Role.DECODE]),
    )
    with pytest.raises(StartupError, match=r"^cuda_graphs: .*stream is capturing"):
        settings = DecodeSettings()
        config = decode_main.engine_config(settings, None)
        decode_main.new_engine(settings, process, config, size, outbox=Received(), on_step=lambda stats: None)
    device.close(BOUND_S)


@pytest.mark.parametrize(("head", "shape", "num_shapes"), CASES)
def test_replayed_forwards_give_the_same_tokens(
    head: str, shape: str | None, num_shapes: int, request: pytest.FixtureRequest
) -> None:
    drafted: Drafted = request.getfixturevalue(head)
    draft = drafted.head if shape else None
    with recording_pair(drafted.target, draft, shape, replays=False) as (plain, devices):
        run(plain)
        assert plain.decode.recorded is None and not any(device.recorder.graphs for device in devices)
    with recording_pair(drafted.target, draft, shape, replays=True) as (replaying, (device, _)):
        assert replaying.decode.recorded is not None
        num_recorded = replaying.decode.recorded.num_graphs
        num_before = device.recorder.num_replays
        run(replaying)
        num_replays = device.recorder.num_replays - num_before
    assert num_recorded == len(device.recorder.graphs) == NUM_SIZES * num_shapes
    assert num_replays >= len(replaying.decode_steps), "a step's forward was not replayed"
    for name, expected in plain.outcomes.items():
        assert_same(replaying.outcomes[name], expected)
