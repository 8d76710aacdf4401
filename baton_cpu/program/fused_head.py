"""A draft head of one layer run as two programs, by the team that runs the target's."""

from __future__ import annotations

import torch
from torch import Tensor

from baton_cpu.program.start import relative
from common.draft.head import DraftHead, DraftOutput, HeadProgram
from common.model.attention import ForwardInput
from common.model.forward_program import ForwardProgram

_CHUNK = 40
"""Tokens of each of two rows, compared as a prompt's chunk behind a prefix."""


class FusedHead(HeadProgram):
    def __init__(self, extend: ForwardProgram, step: ForwardProgram) -> None:
        """Of HeadPrograms."""
        self._extend = extend
        self._step = step

    def takes(self, batch: ForwardInput) -> bool:
        return self._extend.takes(batch)

    def extend(self, batch: ForwardInput, captured: Tensor) -> DraftOutput:
        return _output(self._extend, batch, captured)

    def step(self, batch: ForwardInput, hidden: Tensor) -> DraftOutput:
        return _output(self._step, batch, hidden)


def _output(program: ForwardProgram, batch: ForwardInput, beside: Tensor) -> DraftOutput:
    logits, hidden, _ = program.forward(batch, beside)
    assert hidden is not None
    return DraftOutput(hidden if batch.logits_rows is None else hidden[batch.logits_rows], logits)


def difference(head: DraftHead, program: HeadProgram, *, captured_size: int, dtype: torch.dtype) -> float:
    """Of `program`'s logits and outputs from those of `head`, which does not run it yet: the largest of an extend of
    several rows and the steps behind it, each relative to the head's. `captured_size`: states * H.
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
