"""Compares a program with the model's own modules. A program is used only if both compute the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.draft.head import DraftHead, DraftOutput, HeadProgram
from common.model.forward_probe import differences
from common.model.forward_program import ForwardProgram
from common.model.target import TargetModel

_TOLERANCE = {torch.bfloat16: 0.05, torch.float32: 1e-3}
"""The largest relative difference (`relative`) that is accepted, by dtype. It is not 0, because a program adds in
another order than PyTorch, and so rounds differently.
"""

_EACH_LAYER, _MOST = 0.025, 0.2
"""For a bfloat16 model that chooses experts: the accepted difference of the median token grows by _EACH_LAYER per
layer, up to _MOST. Where two experts nearly tie, rounding chooses, and a token with another expert differs by 13% to
41%. Later layers attend to it, so that the median token differs by more with each layer: by 1% after two layers, 12%
after eight. A program that weights the experts wrongly differs by 20% after two layers already. docs/forwards.md has
more of these figures.
"""

_COMPARED = ((0, 5), (5, 1), (6, 1), (7, 40), (47, 20), (67, 1))
"""The forwards that are compared, as (tokens before, new tokens) of each of two rows: a few new tokens, two steps
of one token, a chunk (many new tokens), a few again, and a step whose attention takes two parts.
"""

_CHUNK = 40
"""New tokens of each of two rows in a forward that compares a head on a chunk of a prompt, after a prefix."""


def difference(model: TargetModel, forward: ForwardProgram, *, check: Callable[[], None] = lambda: None) -> float:
    """Returns how far the results of `forward` are from those of `model`: the largest relative difference (see
    `relative`) of logits, states and KV in a few forwards. It is infinite if the program writes KV of other slots, or
    names another token than the one with its largest logit.

    In a bfloat16 model, rounding may change which experts a token gets. If it chooses experts, the median token counts
    instead of the largest difference. Each number of new tokens has its own median, since most tokens are a chunk's and
    would hide what is wrong in a step.

    `model` must still compute by its own modules, which may read the program's weights. `check` is called between the
    forwards, and may raise.
    """
    generator = torch.Generator().manual_seed(0)
    group = model.layer_group
    num_tokens = _COMPARED[-1][0] + _COMPARED[-1][1]
    kv = torch.zeros((group.num_layers, 2, 2 * num_tokens + 1, group.num_heads, group.head_dim), dtype=model.dtype)
    tables = torch.zeros((3, num_tokens), dtype=torch.int64)
    tables[1:] = torch.randperm(2 * num_tokens, generator=generator).view(2, num_tokens) + 1
    is_routed = _is_routed(model)
    apart: dict[tuple[str, int], list[Tensor]] = {}

    def compare(what: str, seen: Tensor, expected: Tensor) -> None:
        each = differences(seen, expected) if is_routed else torch.tensor([relative(seen, expected)])
        apart.setdefault((what, num_tokens), []).append(each)

    for prefix_len, num_tokens in _COMPARED:
        positions = torch.arange(prefix_len, prefix_len + num_tokens).repeat(2)
        batch = ForwardInput(
            input_ids=torch.randint(0, model.vocab_size, (2 * num_tokens,), generator=generator),
            positions=positions,
            out_cache_loc=tables[1:, prefix_len : prefix_len + num_tokens].flatten(),
            req_to_token=tables,
            req_pool_indices=torch.tensor([1, 2]),
            seq_lens=torch.full((2,), prefix_len + num_tokens),
            prefix_lens=(prefix_len,) * 2 if num_tokens > 1 else None,
            extend_lens=(num_tokens,) * 2 if num_tokens > 1 else None,
            max_seq_len=prefix_len + num_tokens,
            kv=kv.clone(),
            logits_rows=None,
        )
        before = batch.kv.clone()
        check()
        expected = model.forward_to_compare(replace(batch, kv=kv))
        check()
        logits, states, found = forward.forward(batch)
        assert found is not None
        slots = batch.out_cache_loc
        written = batch.kv.index_select(2, slots).movedim(2, 0)
        if not torch.equal(batch.kv, before.index_copy(2, slots, written.movedim(0, 2))):
            return float("inf")
        if not torch.equal(found.token_ids, logits.argmax(dim=-1)):
            return float("inf")
        compare("logits", logits, expected.logits)
        compare("kv", written, kv.index_select(2, slots).movedim(2, 0))
        if expected.hidden is not None:
            assert states is not None
            compare("states", states, expected.hidden)
    joined = [torch.cat(parts) for parts in apart.values()]
    if not all(part.isfinite().all() for part in joined):
        return float("inf")
    return max(float(part.median() if is_routed else part.max()) for part in joined)


def head_difference(head: DraftHead, program: HeadProgram, *, captured_size: int, dtype: torch.dtype) -> float:
    """Returns how far the results of `program` are from those of `head`: the largest relative difference (see
    `relative`) of logits, hidden states and KV.

    It compares an `extend` of a few tokens, two calls of `step` after it, and an `extend` of a chunk of tokens. Each
    computes several rows.

    `head` must still compute by its own layers. `captured_size` is the width of the captured states: number of states *
    H. `dtype` is that of states and KV.
    """
    generator = torch.Generator().manual_seed(0)
    group, num_rows, num_read = head.layer_group, 2, 4
    shape = (group.num_layers, group.num_planes, 2 * _CHUNK + 16, group.num_heads, group.head_dim)
    kv = torch.zeros(shape, dtype=dtype)
    both: tuple[tuple[DraftHead | HeadProgram, Tensor], ...] = ((head, kv), (program, kv.clone()))
    firsts = torch.tensor([[0] * 6, [3, 5, 1, 9, 11, 2], [4, 6, 7, 10, 12, 13]])
    tables = torch.cat([firsts, torch.arange(16, 16 + 2 * _CHUNK).view(2, -1)[[0, 0, 1]]], dim=1)

    def captured(num_tokens: int) -> Tensor:
        return torch.randn((num_rows * num_tokens, captured_size), generator=generator).to(dtype)

    def batch(kv: Tensor, ids: Tensor, prefix_len: int, num_tokens: int) -> ForwardInput:
        is_decode = num_tokens == 1
        return ForwardInput(
            input_ids=ids,
            positions=torch.arange(prefix_len, prefix_len + num_tokens).repeat(num_rows),
            out_cache_loc=tables[1:, prefix_len : prefix_len + num_tokens].flatten(),
            req_to_token=tables,
            req_pool_indices=torch.arange(1, num_rows + 1),
            seq_lens=torch.full((num_rows,), prefix_len + num_tokens),
            prefix_lens=None if is_decode else (prefix_len,) * num_rows,
            extend_lens=None if is_decode else (num_tokens,) * num_rows,
            max_seq_len=prefix_len + num_tokens,
            kv=kv,
            logits_rows=None if is_decode else torch.arange(num_tokens - 1, num_rows * num_tokens, num_tokens),
        )

    def ids(num_tokens: int) -> Tensor:
        return head.token_ids[torch.randint(0, len(head.token_ids), (num_tokens,), generator=generator)]

    chosen, states = ids(num_rows * num_read), captured(num_read)
    outputs = [each.extend(batch(kv, chosen, 0, num_read), states) for each, kv in both]
    apart = [_apart(*outputs)]
    for prefix_len in (num_read, num_read + 1):
        chosen, hidden = ids(num_rows), outputs[0].hidden
        outputs = [each.step(batch(kv, chosen, prefix_len, 1), hidden) for each, kv in both]
        apart.append(_apart(*outputs))
    chosen, states = ids(num_rows * _CHUNK), captured(_CHUNK)
    outputs = [each.extend(batch(kv, chosen, num_read + 2, _CHUNK), states) for each, kv in both]
    apart.append(_apart(*outputs))
    return max(*apart, relative(both[1][1], kv))


def _apart(expected: DraftOutput, seen: DraftOutput) -> float:
    return max(relative(seen.logits, expected.logits), relative(seen.hidden, expected.hidden))


def tolerance(dtype: torch.dtype) -> float:
    """Returns the largest relative difference (see `relative`) that is accepted between a program and the modules of a
    model of `dtype`.
    """
    return _TOLERANCE[dtype]


def target_tolerance(model: TargetModel) -> float:
    """Returns the largest accepted `difference` of a program of `model`."""
    allowed = tolerance(model.dtype)
    return max(allowed, min(_MOST, _EACH_LAYER * model.num_layers)) if _is_routed(model) else allowed


def _is_routed(model: TargetModel) -> bool:
    """Whether rounding may change which experts a token gets."""
    return model.chooses_experts and model.dtype == torch.bfloat16


def relative(seen: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference of both tensors, divided by the norm of `expected`. It is infinite if a number
    of either is not finite.
    """
    distance, size = (seen.float() - expected.float()).norm(), expected.float().norm()
    return float("inf") if not torch.isfinite(distance) else float(distance / size)
