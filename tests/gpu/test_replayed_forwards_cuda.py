"""Replayed CUDA graphs compute the same as forwards that run without recording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.device.cuda import CudaDevice, CudaGraph
from common.device.factory import open_device
from common.draft.head import DraftHead
from common.model.loader import load_target
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from tests.gpu.drafted import load_drafted
from tests.support.drafted import SHAPES
from tests.support.pair import InProcessPair, PairOptions

pytestmark = pytest.mark.gpu

# As in tests/pair/test_replayed_forwards.py: the recorded batch sizes, and the forwards of a step.
NUM_SIZES = 4
HEADS = [
    ("eagle3", 1, "chain-4", 5),
    ("eagle3", 1, "tree-4x3-15", 6),
    ("nextn", 5, "chain-5", 12),
]


def test_graphs_share_memory_and_keep_their_outputs() -> None:
    device = CudaDevice(0)
    recorder = device.graphs
    assert recorder is not None
    stream = device.new_stream("forward")
    inputs = [torch.full((1 << 16,), float(number), device="cuda") for number in range(3)]
    outputs: list[Tensor] = []
    graphs = [recorder.new_graph() for _ in inputs]

    def record() -> None:
        for number, (graph, tensor) in enumerate(zip(graphs, inputs, strict=True)):
            (tensor * 2 + number).sin()
            outputs.extend(graph.record(lambda tensor=tensor, number=number: ((tensor * 2).add(number).sin(),)))

    def replay() -> None:
        for tensor in inputs:
            tensor.add_(1)
        for graph in graphs:
            graph.replay()

    stream.wait(device.schedule_stream.record())
    stream.enqueue(record)
    stream.enqueue(replay)
    stream.record().synchronize(30.0)
    for number, output in enumerate(outputs):
        expected = torch.full((1 << 16,), 2.0 * (number + 1) + number, device="cuda").sin()
        torch.testing.assert_close(output, expected)
    device.close(10.0)


def test_a_dead_graph_is_not_freed_while_another_is_recorded() -> None:
    """Python's collector may free a graph in a reference cycle at any time, and freeing a graph breaks a recording in
    progress.
    """
    device = CudaDevice(0)
    recorder = device.graphs
    assert recorder is not None
    stream = device.new_stream("forward")
    tensor = torch.ones(16, device="cuda")
    outputs: list[Tensor] = []

    def record() -> None:
        dead: list[object] = [recorder.new_graph()]
        dead[0].record(lambda: (tensor * 2,))  # type: ignore[attr-defined]
        dead.append(dead)
        del dead
        living = recorder.new_graph()
        outputs.extend(living.record(lambda: (tensor + len([[] for _ in range(10_000)]),)))
        living.replay()

    stream.wait(device.schedule_stream.record())
    stream.enqueue(record)
    stream.record().synchronize(30.0)
    assert outputs[0].tolist() == [10_001.0] * 16


def test_memory_is_the_cards_and_what_this_process_holds_of_it() -> None:
    device = CudaDevice(0)
    before = device.memory()
    kept = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    after = device.memory()
    assert after.held_bytes - before.held_bytes >= kept.nbytes
    assert after.total_bytes == before.total_bytes >= after.free_bytes + after.held_bytes
    device.close(10.0)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[CudaGraph]:
    """A list to which each replay appends its graph."""
    seen: list[CudaGraph] = []
    replay = CudaGraph.replay

    def noted_replay(self: CudaGraph) -> None:
        seen.append(self)
        replay(self)

    monkeypatch.setattr(CudaGraph, "replay", noted_replay)
    return seen


def check_graphs_change_no_token(
    model: TargetModel, draft: DraftHead | None, shape: str | None, num_shapes: int, replays: list[CudaGraph]
) -> None:
    """Asserts that replaying changes no token, and that every step replays graphs: `num_shapes` kinds for each recorded
    batch size.
    """
    seen: list[list[list[int]]] = []
    for replays_forwards in (False, True):
        options = PairOptions(
            decode_rows=5, replays_forwards=replays_forwards, **(SHAPES[shape] if shape is not None else {})
        )
        pair = InProcessPair(model, new_device=lambda: open_device("cuda", num_threads=1), draft=draft, options=options)
        replays.clear()
        try:
            for number in range(11):
                sampling = ResolvedSampling(seed=number, max_tokens=5 + 4 * number, temperature=0.7 * (number % 2))
                pair.submit(str(number), [4 + (7 * number + place) % 50 for place in range(3 + 9 * number)], sampling)
            pair.run()
            seen.append([pair.outcomes[str(number)].token_ids for number in range(11)])
            recorded = pair.decode.recorded
            if replays_forwards:
                assert recorded is not None and recorded.num_bytes > 0
                assert recorded.num_graphs == NUM_SIZES * num_shapes
                assert len(replays) >= len(pair.decode_steps), "a step's forward was not replayed"
            else:
                assert recorded is None and not replays
        finally:
            pair.close()
    assert seen[0] == seen[1]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mixtral", "gpt_oss"])
def test_graphs_change_no_token(
    architecture: str, replays: list[CudaGraph], tiny_model_dir: Callable[[str], Path]
) -> None:
    model = load_target(tiny_model_dir(architecture), device="cuda", dtype="float32")
    check_graphs_change_no_token(model, None, None, 1, replays)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_forwards_of_experts_are_recorded(
    architecture: str, dtype: str, replays: list[CudaGraph], tiny_model_dir: Callable[[str], Path]
) -> None:
    model = load_target(tiny_model_dir(architecture), device="cuda", dtype=dtype)
    pair = InProcessPair(model, new_device=lambda: open_device("cuda", num_threads=1), options=PairOptions())
    try:
        for number in range(4):
            pair.submit(str(number), [5, 6, 7 + number], ResolvedSampling(seed=number, max_tokens=9, temperature=0.0))
        pair.run()
        assert [len(pair.outcomes[str(number)].token_ids) for number in range(4)] == [9] * 4
        assert len(replays) >= len(pair.decode_steps)
    finally:
        pair.close()


@pytest.mark.parametrize(("family", "num_layers", "shape", "num_shapes"), HEADS)
def test_graphs_change_no_token_of_speculation(
    family: str, num_layers: int, shape: str, num_shapes: int, replays: list[CudaGraph], tmp_path: Path
) -> None:
    _, model, head = load_drafted(tmp_path, family, num_layers, logits_std=1.5)
    check_graphs_change_no_token(model, head, shape, num_shapes, replays)
