"""CUDA graphs: replayed forwards are those that run as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.device.cuda import CudaDevice
from common.device.factory import open_device
from common.model.loader import load_target
from common.model.sampling_params import ResolvedSampling
from tests.support.pair import InProcessPair, PairOptions

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _exact_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


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


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_graphs_change_no_token(architecture: str, tiny_model_dir: Callable[[str], Path]) -> None:
    model = load_target(tiny_model_dir(architecture), device="cuda", dtype="float32")
    seen: list[list[list[int]]] = []
    for replays_forwards in (False, True):
        pair = InProcessPair(
            model,
            new_device=lambda: open_device("cuda", num_threads=1),
            options=PairOptions(replays_forwards=replays_forwards),
        )
        try:
            assert (pair.decode.recorded is not None) == replays_forwards
            for number in range(11):
                sampling = ResolvedSampling(seed=number, max_tokens=5 + 4 * number, temperature=0.7 * (number % 2))
                pair.submit(str(number), [10 + 7 * number + place for place in range(3 + 9 * number)], sampling)
            pair.run()
            seen.append([pair.outcomes[str(number)].token_ids for number in range(11)])
        finally:
            pair.close()
    assert seen[0] == seen[1]
