"""Compares the GPU's sampling kernel with PyTorch's operators on a device, for a large vocabulary and in one launch."""

from __future__ import annotations

import pytest
import torch

from common.sampling.operators import sample
from common.sampling.state import SamplingBatch
from common.sampling.triton_draws import TritonDraws
from tests.sampling.test_draw_kernels import CUTS, RULES, both, check_same, requests, state_of

pytestmark = pytest.mark.gpu
VOCAB = 128256


@pytest.mark.parametrize("rules", [CUTS, RULES], ids=["cuts", "rules"])
def test_it_draws_the_same_tokens(rules: dict[str, dict[str, object]]) -> None:
    sampling = requests(4 * list(rules.values()))
    logits = torch.randn((len(sampling), VOCAB), generator=torch.Generator().manual_seed(0)).cuda() * 3
    check_same(*both(logits, sampling, positions=range(5, 9)))


def test_it_is_recorded_and_waits_for_nothing() -> None:
    sampling = requests(list({**CUTS, **RULES}.values()))
    state = state_of(sampling, TritonDraws(), vocab_size=VOCAB, device=torch.device("cuda"))
    rows = torch.arange(1, len(sampling) + 1, device="cuda")
    logits = torch.randn((len(sampling), VOCAB), device="cuda")
    batch = SamplingBatch.of(sampling)
    expected = sample(logits.clone(), rows, rows, state, batch).token_ids  # compiles
    state = state_of(sampling, TritonDraws(), vocab_size=VOCAB, device=torch.device("cuda"))
    given = logits.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sample(given, rows, rows, state, batch)
    graph.replay()
    assert drawn.token_ids.tolist() == expected.tolist()
