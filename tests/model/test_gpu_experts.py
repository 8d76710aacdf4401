"""Tests that experts computed for every token equal those computed for the tokens that chose them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import grouped_mm_experts_forward

from common.model.gpu_experts import compute_all_experts

NUM_TOKENS, NUM_CHOSEN = 9, 2


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "olmoe", "gpt_oss"])
def test_all_experts_equal_the_chosen_ones(architecture: str, tiny_model_dir: Callable[[str], Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir(architecture), dtype=torch.float32).eval()
    experts = model.get_submodule("model.layers.0.mlp.experts")
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(NUM_TOKENS, model.config.hidden_size, generator=generator)
    scores = torch.rand(NUM_TOKENS, experts.num_experts, generator=generator)
    weights, chosen = scores.topk(NUM_CHOSEN)
    with torch.no_grad():
        wanted = grouped_mm_experts_forward(experts, states, chosen, weights)
        torch.testing.assert_close(compute_all_experts(experts, states, chosen, weights), wanted)
        assert not torch.allclose(compute_all_experts(experts, states, chosen, weights.flip(1)), wanted)
