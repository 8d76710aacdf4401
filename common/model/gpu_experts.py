"""Mixture-of-experts layers on a GPU, in a form that can be recorded into a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

_NAME = "baton"
_MIN_CAPABILITY = (8, 0)
"""From this compute capability on, torch has one kernel for grouped products in bfloat16."""


def use_recordable_experts(model: Any, torch_device: torch.device) -> None:
    """Lets the experts of `model`, if it has any, be computed in recorded forwards too.

    torch's grouped product of another type than bfloat16 reads the groups' sizes on the host, which a recording cannot.
    """
    has_kernel = model.dtype == torch.bfloat16 and torch.cuda.get_device_capability(torch_device) >= _MIN_CAPABILITY
    if not has_kernel:
        ALL_EXPERTS_FUNCTIONS.register(_NAME, _experts_forward)
        model.set_experts_implementation(_NAME)


def _experts_forward(experts: Any, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    compute = compute_all_experts if torch.cuda.is_current_stream_capturing() else grouped_mm_experts_forward
    return compute(experts, states, chosen, weights)


def compute_all_experts(experts: Any, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Computes every expert for every token, and adds those that a token has chosen, times their weights.

    Reads all weights once, however few tokens there are. Shapes: states and the result [T, hidden]; chosen, the
    experts' numbers, and weights [T, experts of a token]. `experts` is a module of transformers' experts interface.
    """
    share = states.new_zeros(len(states), experts.num_experts).scatter_(1, chosen, weights.to(states.dtype))
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    hidden = _of_each_expert(experts, first, states.expand(experts.num_experts, -1, -1))
    hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    outputs = _of_each_expert(experts, "down_proj", hidden)
    if getattr(experts, "has_post_expert_norm", False):
        outputs = experts.post_expert_norm(outputs)
    return torch.einsum("te,eth->th", share, outputs)


def _of_each_expert(experts: Any, name: str, inputs: Tensor) -> Tensor:
    """Applies the linear layer `name` of each expert. Shapes: inputs [experts, T, in], the result [experts, T, out]."""
    weight = getattr(experts, name)
    outputs: Tensor = inputs @ (weight if experts.is_transposed else weight.mT)
    return outputs + getattr(experts, f"{name}_bias").unsqueeze(1) if experts.has_bias else outputs
