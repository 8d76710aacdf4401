"""Compiles GPU kernels before the first request. Otherwise a kernel would be compiled at its first launch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from common.attention.backend import ForwardInput, KernelShape
from common.device.stream import Scope, Stream
from common.engine.parts import EngineParts
from common.kv.pool import KvPool
from common.kv.row_table import PADDING_ROW
from common.kv.slot_allocator import PADDING_SLOT
from common.sampling.state import DrawKernels, SamplingState


def warm_kernels(
    parts: EngineParts,
    *,
    draft_topk: int,
    pool: KvPool,
    sampling_state: SamplingState,
    stream: Stream,
    timeout_s: float,
) -> None:
    """Runs forwards of padding on `stream`, to compile all kernels of the target, the draft head and sampling.

    It runs one forward for each shape for which attention has a kernel, also with tree masks if `draft_topk` is above
    1 (tree drafting). Blocks until all are done. Raises PieceFailed if one fails, and DeviceTimeout after `timeout_s`.
    """
    model, draft, device = parts.model, parts.draft, parts.device
    shapes = model.attention.kernel_shapes(with_masks=draft_topk > 1)
    draws = sampling_state.kernels

    @torch.inference_mode()
    def compile_kernels() -> None:
        for shape in shapes:
            window = padding_forward(shape, pool, model.layer_group.name)
            output = model.forward(window)
            if draft is None:
                continue
            assert output.hidden is not None, "the target captures what the head reads"
            window = replace(window, kv=pool.buffers[draft.layer_group.name], windows=())
            hidden = draft.fuse(output.hidden)
            for layer in range(draft.layer_group.num_layers):
                draft.forward(window, hidden, layer=layer)

        if draws is not None:
            compile_draws(draws)

    def compile_draws(draws: DrawKernels) -> None:
        """Runs each sampling kernel once, on row 0, which is padding."""
        row = torch.full((1,), PADDING_ROW, dtype=torch.int64, device=device.torch_device)
        logits = torch.zeros((1, sampling_state.vocab_size), device=device.torch_device)
        draws.draw(logits, row, row, sampling_state, None, is_counted=False)
        if draft is not None:
            logits = torch.zeros((1, draft.token_ids.shape[0]), device=device.torch_device)
            draws.propose(logits, draft.token_ids, row, row, sampling_state)
            draws.couple(logits, draft.token_ids, row, row, sampling_state)

    if shapes or draws is not None:
        scope = Scope("compiling kernels")
        stream.wait(device.schedule_stream.record())
        stream.enqueue(compile_kernels, scope)
        stream.record(scope).synchronize(timeout_s)


def padding_forward(shape: KernelShape, pool: KvPool, group: str) -> ForwardInput:
    """Returns the input of a forward of this shape, over row 0 and slot 0, which are padding.

    `group` is the name of the layer group in `pool` whose KV the forward reads and writes.
    """
    table = pool.rows.req_to_token

    def column(length: int, value: int) -> Tensor:
        return torch.full((length,), value, dtype=torch.int64, device=table.device)

    num_new = shape.num_new
    return ForwardInput(
        input_ids=column(num_new, 0),
        positions=column(num_new, 0),
        out_cache_loc=column(num_new, PADDING_SLOT),
        req_to_token=table,
        req_pool_indices=column(1, PADDING_ROW),
        seq_lens=column(1, min(num_new, table.shape[1])),
        prefix_lens=(0,),
        extend_lens=(num_new,),
        max_seq_len=shape.max_seq_len,
        kv=pool.buffers[group],
        windows=pool.windows_beside(group),
        logits_rows=column(1, num_new - 1),
        tree_mask=torch.ones((num_new, num_new), dtype=torch.bool, device=table.device) if shape.has_mask else None,
    )
