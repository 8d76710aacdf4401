"""Copies KV on the host. Large copies bypass the CPU caches, because a plain store first reads the cache line that it
overwrites, and evicts data that the forward running at the same time needs.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import cast

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from baton_cpu.compiler.jit import Kernel
from baton_cpu.compiler.kernel_cache import compiled
from baton_cpu.compiler.vectors import INT, LINE_BYTES, WORD, prefetch_line

MIN_BYTES = 4 << 20  # a smaller copy may still be in a cache when it is first read

_NUM_VECTORS = 2
_VECTOR = ir.VectorType(WORD, LINE_BYTES // _NUM_VECTORS // 8)
_VECTOR_BYTES = LINE_BYTES // _NUM_VECTORS
_BYTES_AHEAD = 512


def copy_kv(target: Tensor, source: Tensor) -> None:
    """Copies `source` to `target`: KV [layers, planes, tokens, ...] of one shape and dtype on the host, with any
    strides. The planes are keys and values. Large copies bypass the CPU's caches where the layout allows it.
    """
    assert target.shape == source.shape and target.dtype == source.dtype
    num_bytes = target.numel() * target.itemsize
    if num_bytes < MIN_BYTES or not source[0, 0].is_contiguous() or not _is_in_lines(target):
        target.copy_(source)
        return
    num_layers, num_planes = target.shape[:2]
    size = target.itemsize
    strides = [stride * size for tensor in (target, source) for stride in tensor.stride()[:2]]
    block_bytes = num_bytes // (num_layers * num_planes)
    copy_blocks()(target.data_ptr(), source.data_ptr(), *strides, num_layers, num_planes, block_bytes)


@cache
def copy_blocks() -> Kernel:
    """Returns the compiled kernel, `_copy_blocks(target, source, target_layer, target_plane, source_layer,
    source_plane, num_layers, num_planes, block_bytes)`. It copies one contiguous block of `block_bytes` for each layer
    and plane, past the caches.

    `target` and `source` are addresses of the first blocks, and the next four arguments are strides in bytes. The
    target's address and strides, and `block_bytes`, must be multiples of LINE_BYTES. The source's address and strides
    may be any.
    """
    lines = torch.zeros(3 * LINE_BYTES, dtype=torch.uint8)
    source = lines.data_ptr() + -lines.data_ptr() % LINE_BYTES
    return compiled(_copy_blocks, (source + LINE_BYTES, source, 0, 0, 0, 0, 1, 1, LINE_BYTES), name="copy")


def _is_in_lines(tensor: Tensor) -> bool:
    size, strides = tensor.itemsize, tensor.stride()
    block = tensor[0, 0]
    starts = (tensor.data_ptr(), block.numel() * size, strides[0] * size, strides[1] * size)
    return block.is_contiguous() and all(start % LINE_BYTES == 0 for start in starts)


def _copy_blocks(
    target, source, target_layer, target_plane, source_layer, source_plane, num_layers, num_planes, block_bytes
):
    for layer in range(num_layers):
        for plane in range(num_planes):
            begin = source + layer * source_layer + plane * source_plane
            away = target + layer * target_layer + plane * target_plane - begin
            for line in range(begin, begin + block_bytes, LINE_BYTES):
                copy_line(line + away, line, min(line + _BYTES_AHEAD, begin + block_bytes - LINE_BYTES))
    await_stores()


@intrinsic
def _copy_line(_context, target, source, ahead):
    def generate(target_context, builder, _signature, arguments):
        to, line, following = arguments
        prefetch_line(builder, following, once=True)
        past_caches = builder.module.add_metadata([INT(1)])
        offsets = [WORD(place * _VECTOR_BYTES) for place in range(_NUM_VECTORS)]
        vectors = []
        for offset in offsets:
            vector = builder.load(builder.inttoptr(builder.add(line, offset), _VECTOR.as_pointer()))
            vector.align = 1
            vectors.append(vector)
        for offset, vector in zip(offsets, vectors, strict=True):
            store = builder.store(vector, builder.inttoptr(builder.add(to, offset), _VECTOR.as_pointer()))
            store.align = _VECTOR_BYTES
            store.set_metadata("nontemporal", past_caches)
        return target_context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _await_stores(_context):
    def generate(target, builder, _signature, _arguments):
        if platform.machine() == "x86_64":  # other x86 fences need not wait for stores past the caches
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse.sfence", (), kind), [])
        else:
            builder.fence("seq_cst")
        return target.get_dummy_value()

    return types.void(), generate


copy_line = cast("Kernel", _copy_line)
"""`copy_line(target, source, ahead)`, for kernels: copies LINE_BYTES from address `source` to address `target`, past
the caches, and prefetches the line at address `ahead`.
"""
await_stores = cast("Kernel", _await_stores)
"""`await_stores()`, for kernels: a store fence. Other threads see every store that this thread made past the caches
before any store that it makes from now on.
"""
