"""Compiles the Triton kernels for A100 (sm_80), H100 (sm_90) and B200 (sm_100), without any of these GPUs.

It compiles what a service would launch: it runs forwards on tensors without memory and records their kernel launches.
For each kernel it reports the shared memory, the registers of a thread, and the bytes that a thread spills. Writes a
table into benchmarks/results. The exit status is 1 if a kernel does not fit its GPU, or spills more than a few values.
`--few` compiles a few dozen kernels that differ most, and saves nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton
from torch import Tensor

from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.kernel_variants import Variant
from common.attention.backend import ForwardInput, KernelShape, LayerAttention
from common.attention.fp8_kv import FP8_BITS
from common.attention.triton_attention import HeadShape, Tiles, TritonAttention
from common.attention.triton_kernels import attend
from common.device.triton_launch import Launch
from common.errors import StartupError
from common.model.layers_triton import LayerKernels, Norm, multiply
from common.sampling.state import SamplingState
from common.sampling.triton_draws import TritonDraws, draw

SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}
"""The most shared memory of a multiprocessor that one program can have, in bytes, by compute capability."""
OVERLAPPING = 90  # from this compute capability on, a kernel can start while the one before it ends
NUM_REGISTERS = 65_536  # registers of a multiprocessor
MAX_SPILLED_BYTES = 256  # per thread
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADS = [
    *((32, 8, size) for size in (64, 128, 16, 32, 80, 96)),
    *((32, 32, 128), (28, 4, 128), (64, 8, 128), (48, 1, 128), (71, 1, 64), (71, 1, 128)),
    *((16, 8, 256), (8, 2, 512)),
]
"""The attention shapes to compile, as (query heads, KV heads, head size).

They cover every supported head size with one grouping, then groupings from one KV head for each query head (Llama 2) to
one KV head for all (Falcon).
"""


_WORDS = {
    "IS_SPLIT": "parts",
    "HAS_MASK": "mask",
    "HAS_WINDOW": "window",
    "HAS_SOFTCAP": "soft cap",
    "HAS_SINKS": "sinks",
    "HAS_NORM": "norm",
    "IS_GATED": "gated",
    "HAS_ADDED": "sum",
}
"""Words for the report, by the kernel constant that switches the feature on."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes of a decoder layer. `heads` are the numbers of query heads and KV heads, and the head size."""

    hidden_size: int
    intermediate_size: int
    heads: tuple[int, int, int]
    vocab_size: int
    dtype: torch.dtype


LLAMA_8B = LayerSizes(4096, 14336, (32, 8, 128), 128256, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The resources of one compiled kernel.

    `what` tells it from other variants of the same kernel. `num_shared` is the number of query heads per KV head; it
    and `head_dim` are 0 for kernels without heads. `reckoned_bytes` is the shared memory that the choice of tile sizes
    assumed; None for kernels without tiles.
    """

    capability: int
    kernel: str
    dtype: str
    num_shared: int
    head_dim: int
    what: str
    num_warps: int
    shared_bytes: int
    reckoned_bytes: int | None
    num_registers: int
    spilled_bytes: int

    @property
    def fits(self) -> bool:
        limit = SHARED_BYTES[self.capability]
        return (
            self.shared_bytes <= (limit if self.reckoned_bytes is None else min(limit, self.reckoned_bytes))
            and self.num_registers * 32 * self.num_warps <= NUM_REGISTERS
            and self.spilled_bytes <= MAX_SPILLED_BYTES
        )


def attention_launches(
    heads: HeadShape,
    shape: KernelShape,
    shared_bytes: int,
    *,
    num_slots: int = 4096,
    overlaps: bool = False,
    has_all: bool = False,
    fp8_kv: bool = False,
) -> list[Launch]:
    """Returns the kernel launches of attention in one layer, over a pool of `num_slots`.

    With `has_all` the layer has a window, a soft cap and sinks. With `fp8_kv` the pool is in FP8. `overlaps` says
    whether the device starts a kernel before the previous one ends. Raises StartupError if the kernels do not support
    such heads.
    """
    launches: list[Launch] = []
    backend = TritonAttention(heads, shared_bytes=shared_bytes, overlaps=overlaps, launch=launches.append)

    def empty(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    num_new, kv_dtype = shape.num_new, FP8_BITS if fp8_kv else heads.dtype
    batch = ForwardInput(
        input_ids=empty(num_new),
        positions=empty(num_new),
        out_cache_loc=empty(num_new),
        req_to_token=empty(65, 8192),
        req_pool_indices=empty(1),
        seq_lens=empty(1),
        prefix_lens=(0,),
        extend_lens=(num_new,),
        max_seq_len=shape.max_seq_len,
        kv=empty(1, 2, num_slots, heads.num_kv_heads, heads.head_dim, dtype=kv_dtype),
        logits_rows=None,
        tree_mask=empty(num_new, num_new, dtype=torch.bool) if shape.has_mask else None,
    )
    query = empty(num_new, heads.num_heads, heads.head_dim, dtype=heads.dtype)
    key, value = (empty(num_new, heads.num_kv_heads, heads.head_dim, dtype=kv_dtype) for _ in range(2))
    how = LayerAttention(1.0)
    if has_all:
        how = LayerAttention(1.0, window=512, softcap=50.0, sinks=empty(heads.num_heads, dtype=heads.dtype))
    backend.plan(batch).attend(0, query, key, value, how)
    return launches


def compiled(
    variant: Variant,
    capability: int,
    dtype: torch.dtype,
    *,
    num_shared: int = 0,
    head_dim: int = 0,
    fp8_kv: bool = False,
) -> Compiled:
    kernel = variant.compile(capability)
    num_registers, spilled_bytes = _resources(kernel.asm["cubin"])
    constants, options = variant.constants, dict(variant.options)
    words: list[str] = []
    reckoned_bytes = None
    if variant.kernel is attend:
        blocks = constants["QUERY_BLOCK"], constants["TOKEN_BLOCK"]
        tiles = Tiles(*blocks, num_stages=options["num_stages"], num_warps=options["num_warps"])
        reckoned_bytes = tiles.shared_bytes(constants["DIM_BLOCK"], dtype.itemsize)
        words = [f"{tiles.query_block} x {tiles.token_block}"]
    if variant.kernel is draw:
        words = ["target" if constants["IS_TARGET"] else "draft" if constants["IS_CHOSEN"] else "draft's tree"]
    if variant.kernel is multiply:
        words = [f"{constants['NUM_OUTPUTS']} of {constants['NUM_INPUTS']}"]
    words += [word for name, word in _WORDS.items() if constants.get(name)]
    words += ["KV in FP8"] if fp8_kv else []
    return Compiled(
        capability=capability,
        kernel=variant.kernel.name,
        dtype=str(dtype).removeprefix("torch."),
        num_shared=num_shared,
        head_dim=head_dim,
        what=", ".join(words),
        num_warps=options["num_warps"],
        shared_bytes=kernel.metadata.shared,
        reckoned_bytes=reckoned_bytes,
        num_registers=num_registers,
        spilled_bytes=spilled_bytes,
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Returns a thread's registers and its bytes of local memory, which hold the spilled values."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([program, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", told)
    assert numbers is not None, told
    return int(numbers[1]), int(numbers[2]) + int(numbers[3])


def attention_kernels(
    capability: int,
    heads: HeadShape,
    shapes: list[KernelShape] | None = None,
    *,
    has_all: bool = False,
    fp8_kv: bool = False,
) -> Iterator[Compiled | StartupError]:
    """Compiles each attention kernel for these heads once. Yields the StartupError instead if the heads are refused.

    `has_all` and `fp8_kv` are those of `attention_launches`.
    """
    limit = SHARED_BYTES[capability]
    try:
        wanted = shapes or TritonAttention(heads, shared_bytes=limit).kernel_shapes(with_masks=True)
        overlaps = capability >= OVERLAPPING
        launches = [
            launch
            for shape in wanted
            for launch in attention_launches(heads, shape, limit, overlaps=overlaps, has_all=has_all, fp8_kv=fp8_kv)
        ]
    except StartupError as error:
        yield error
        return
    for variant in dict.fromkeys(Variant.of(launch) for launch in launches):
        yield compiled(
            variant, capability, heads.dtype, num_shared=heads.num_shared, head_dim=heads.head_dim, fp8_kv=fp8_kv
        )


def sampling_launches(vocab_size: int, draft_vocab_size: int) -> list[Launch]:
    """Returns the kernel launches of sampling: drawing target tokens and draft tokens, and sampling a draft tree."""
    launches: list[Launch] = []
    draws, device = TritonDraws(launches.append), torch.device("meta")
    state = SamplingState(max_rows=8, vocab_size=vocab_size, torch_device=device, kernels=draws)
    rows = torch.empty(3, dtype=torch.int64, device=device)
    token_ids = torch.empty(draft_vocab_size, dtype=torch.int64, device=device)
    draws.draw(torch.empty((3, vocab_size), device=device), rows, rows, state, None, is_counted=True)
    for drafts in (draws.propose, draws.couple):
        drafts(torch.empty((3, draft_vocab_size), device=device), token_ids, rows, rows, state)
    return launches


def sampling_kernels(capability: int) -> Iterator[Compiled]:
    for launch in sampling_launches(128256, 32000):
        yield compiled(Variant.of(launch), capability, torch.float32)


def layer_launches(layer: LayerSizes, *, overlaps: bool = False) -> list[Launch]:
    """Returns the kernel launches of a decoder layer, in a forward of one token and in a forward of many.

    `overlaps` says whether the device starts a kernel before the previous one ends.
    """
    launches: list[Launch] = []
    kernels, dtype = LayerKernels(overlaps=overlaps, launch=launches.append), layer.dtype

    def empty(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    hidden, inner, (num_heads, num_kv_heads, head_dim) = layer.hidden_size, layer.intermediate_size, layer.heads
    norm, head_norm = Norm(empty(hidden), 1e-5), Norm(empty(head_dim), 1e-5)
    num_joined = num_heads + 2 * num_kv_heads
    one, attended = empty(1, hidden), empty(1, num_heads * head_dim)
    kernels.multiplied(one, empty(num_joined * head_dim, hidden), norm=norm)
    kernels.multiplied(attended, empty(hidden, num_heads * head_dim), added=one)
    kernels.multiplied(one, empty(2 * inner, hidden), norm=norm, is_gated=True)
    kernels.multiplied(empty(1, inner), empty(hidden, inner), added=one)
    kernels.multiplied(one, empty(layer.vocab_size, hidden))
    many, rotation = empty(64, hidden), (empty(64, head_dim), empty(64, head_dim))
    kernels.normed(many, norm)
    kernels.added_and_normed(many, many, norm)
    kernels.gated(empty(64, 2 * inner))
    for norms in (None, (head_norm, head_norm)):
        kernels.rotate(
            empty(64, num_joined, head_dim),
            rotation,
            num_query_heads=num_heads,
            num_key_heads=num_kv_heads,
            norms=norms,
        )
    return launches


def layer_kernels(capability: int, layer: LayerSizes) -> Iterator[Compiled]:
    for launch in layer_launches(layer, overlaps=capability >= OVERLAPPING):
        yield compiled(Variant.of(launch), capability, layer.dtype)


def few() -> Iterator[Compiled | StartupError]:
    """Compiles a few dozen kernels that differ most.

    These are attention kernels of decoding, prompts and draft trees on each GPU and in each dtype; the sampling of
    target tokens on each GPU and of drafts on one; and a layer's kernels on two GPUs.
    """
    llama, narrow = HeadShape(32, 8, 128, torch.bfloat16), HeadShape(32, 8, 64, torch.float32)
    wide = HeadShape(16, 8, 256, torch.float16)
    decode, prompt, tree = KernelShape(1, 900), KernelShape(64, 64), KernelShape(16, 900, has_mask=True)
    for capability, heads, shape in ((80, llama, decode), (90, llama, tree), (100, llama, decode)):
        yield from attention_kernels(capability, heads, [shape])
        yield from itertools.islice(sampling_kernels(capability), 3 if capability == 90 else 1)
    for capability, heads in ((80, wide), (90, narrow), (100, llama)):
        yield list(attention_kernels(capability, heads, [prompt]))[-1]
    for capability, heads, shape in ((80, narrow, prompt), (90, wide, tree)):
        yield list(attention_kernels(capability, heads, [shape], has_all=True))[1]
    for capability, heads, shape in ((80, narrow, prompt), (90, llama, decode), (100, wide, tree)):
        yield from attention_kernels(capability, heads, [shape], has_all=True, fp8_kv=True)
    small, shared = HeadShape(32, 8, 16, torch.bfloat16), HeadShape(71, 1, 64, torch.float32)
    yield from layer_kernels(80, replace(LLAMA_8B, dtype=torch.float32))
    yield from layer_kernels(90, LLAMA_8B)
    for capability, heads in ((100, small), (90, shared)):  # the kernels that need the most registers
        yield list(attention_kernels(capability, heads, [KernelShape(64, 64, has_mask=True)]))[-1]


def every(head_sizes: Sequence[int]) -> Iterator[Compiled | StartupError]:
    """Compiles all kernels, with attention for heads of these sizes."""
    for capability in SHARED_BYTES:
        yield from sampling_kernels(capability)
        for dtype in DTYPES:
            yield from layer_kernels(capability, replace(LLAMA_8B, dtype=dtype))
    for capability, dtype, heads in itertools.product(SHARED_BYTES, DTYPES, HEADS):
        if heads[2] in head_sizes:
            yield from attention_kernels(capability, HeadShape(*heads, dtype))
            yield from attention_kernels(capability, HeadShape(*heads, dtype), has_all=True)
            yield from attention_kernels(capability, HeadShape(*heads, dtype), has_all=True, fp8_kv=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="a dozen or so that differ most, as lines of JSON")
    parser.add_argument(
        "--head-sizes", type=int, nargs="+", metavar="SIZE", help="only these; all take half an hour or so"
    )
    args = parser.parse_args()
    rows: list[Compiled] = []
    refused: list[str] = []
    for each in few() if args.few else every(args.head_sizes or [size for _, _, size in HEADS]):
        if isinstance(each, StartupError):
            refused.append(str(each))
            continue
        rows.append(each)
        print(json.dumps(asdict(each)), flush=True)
    misfits = [each for each in rows if not each.fits]
    for each in misfits:
        print(f"does not fit: {each}", file=sys.stderr)
    if not args.few:
        run = BenchmarkRun.of("compile_kernels")
        sizes, groups = (
            ", ".join(map(str, sorted(numbers - {0})))
            for numbers in ({row.head_dim for row in rows}, {row.num_shared for row in rows})
        )
        about = (
            "compiled ahead of time, no device was there; shared memory in bytes, registers and spilled bytes of a "
            f"thread. Heads of {sizes} numbers, {groups} query heads to one of K and V. {len(rows) - len(misfits)} of "
            f"{len(rows)} kernels fit; heads that are refused at start-up are named below."
        )
        told = [f"- {each}" for each in dict.fromkeys(refused)]
        lines = [*run.heading("Compiled kernels", about), "", *_table(rows), "", *told]
        run.save("compiled-kernels", "\n".join(lines))
    sys.exit(1 if misfits else 0)


def _table(rows: list[Compiled]) -> Iterator[str]:
    """Yields a table with a line for each kernel: shared memory / registers / spilled bytes on each GPU."""
    targets = " | ".join(f"sm_{each}" for each in SHARED_BYTES)
    yield f"| kernel | dtype | query heads to one of K and V | head size | tile | warps | {targets} |"
    yield "|---" * (6 + len(SHARED_BYTES)) + "|"
    cells: dict[tuple[object, ...], dict[int, str]] = {}
    for row in rows:
        key = (row.kernel, row.dtype, row.num_shared, row.head_dim, row.what, row.num_warps)
        figures = f"{row.shared_bytes:,} / {row.num_registers}"
        if row.spilled_bytes:
            figures += f" / {row.spilled_bytes}"
        cells.setdefault(key, {})[row.capability] = figures
    for tile, by_target in cells.items():
        yield f"| {' | '.join(map(str, tile))} | {' | '.join(by_target.get(each, '') for each in SHARED_BYTES)} |"


if __name__ == "__main__":
    main()
