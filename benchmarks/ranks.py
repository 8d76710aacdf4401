"""Measures what a second rank is worth on a CPU: forwards of one rank and of two, each with one thread.

The model is cut as with `tensor_parallel`. A forward's time is compared with that of one rank, and with the parts of a
step that ranks add: telling the other rank, and sums and joins. A part's cost is that of many in a row, in which no
rank waits for another's products. All forwards run on PyTorch's operators. The table is written to benchmarks/results.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.benchmark_run import BenchmarkRun
from common.attention.backend import ForwardInput
from common.checkpoints.cache import kernels_cache_dir
from common.checkpoints.source import resolve_model
from common.model.loader import LoadArguments, load_target
from common.model.target import TargetModel
from common.ranks.leader import Ranks, lost_ranks_named
from common.service.cpu_engine import cpu_engine

NUM_RANKS = 2
CONTEXT = 200
FORWARDS = {"1 row decodes": (1, 1), "16 rows decode": (16, 1), "a prompt of 512 tokens": (1, 512)}
"""The rows of a forward, and the new tokens of each."""


def forward_of(model: TargetModel, num_rows: int, num_new: int) -> ForwardInput:
    """Returns the input of a forward of rows of CONTEXT + `num_new` tokens, with a pool of their own."""
    zeros = model.pool_tensors.zeros
    length = CONTEXT + num_new
    group = model.layer_group
    shape = (group.num_layers, group.num_planes, 1 + num_rows * length, group.num_heads, group.head_dim)
    table = zeros((1 + num_rows, length), torch.int64)
    table[1:] = 1 + torch.arange(num_rows * length).view(num_rows, length)
    num_tokens = num_rows * num_new
    return ForwardInput(
        input_ids=torch.arange(num_tokens) % 1000,
        positions=torch.arange(CONTEXT, length).repeat(num_rows),
        out_cache_loc=table[1:, CONTEXT:].flatten(),
        req_to_token=table,
        req_pool_indices=torch.arange(1, 1 + num_rows),
        seq_lens=torch.full((num_rows,), length),
        prefix_lens=None if num_new == 1 else (CONTEXT,) * num_rows,
        extend_lens=None if num_new == 1 else (num_new,) * num_rows,
        max_seq_len=length,
        kv=zeros(shape, model.dtype),
        logits_rows=None if num_new == 1 else torch.tensor([num_tokens - 1]),
    )


def median_s(work: Callable[[], object], *, seconds: float) -> float:
    """Returns the median time of `work`, repeated for so long."""
    work()
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(times) < 5:
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


class Parts:
    """Notes the time that a forward spends in telling the other ranks, and in sums and joins, waiting included."""

    def __init__(self, ranks: Ranks) -> None:
        self.begin_s = self.together_s = 0.0
        self.num_sums = 0
        begin, collective = ranks.begin, ranks.part.collective
        sum_up, joined = collective.sum_up, collective.joined

        def timed_begin(batch: ForwardInput) -> None:
            began_s = time.perf_counter()
            begin(batch)
            self.begin_s += time.perf_counter() - began_s

        def timed_sum(values: Tensor) -> None:
            began_s = time.perf_counter()
            sum_up(values)
            self.together_s += time.perf_counter() - began_s
            self.num_sums += 1

        def timed_join(part: Tensor, widths: list[int]) -> Tensor:
            began_s = time.perf_counter()
            output = joined(part, widths)
            self.together_s += time.perf_counter() - began_s
            return output

        ranks.begin = timed_begin  # type: ignore[method-assign]
        collective.sum_up = timed_sum  # type: ignore[method-assign]
        collective.joined = timed_join  # type: ignore[method-assign,assignment]

    def clear(self) -> None:
        self.begin_s = self.together_s = 0.0
        self.num_sums = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each figure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine = cpu_engine(torch.device("cpu"))
    assert engine is not None
    engine.keep_kernels(kernels_cache_dir())
    directory: Path = resolve_model("demo", lambda *_: None, dtype=args.dtype)
    arguments = LoadArguments(
        device="cpu",
        dtype=args.dtype,
        kv_dtype="auto",
        max_context_tokens=None,
        attention="kernels",
        cpu_engine=engine,
        optimizes_modules=True,
    )
    with ExitStack() as stack:
        alone = load_target(directory, **arguments)
        devices = [alone.torch_device] * NUM_RANKS
        ranks = Ranks(engine, devices, directory, arguments, num_threads=1, kernels_dir=kernels_cache_dir(), tf32=False)
        stack.callback(ranks.close)
        with lost_ranks_named(ranks):
            cut = load_target(directory, **arguments, part=ranks.part)
        cut.lead(ranks)
        parts = Parts(ranks)
        lines = BenchmarkRun.of("ranks").heading(
            "Ranks on a CPU",
            f"SmolLM2-135M-Instruct, {args.dtype}, operators, one thread a rank, after {CONTEXT} tokens; medians, of"
            f" {args.rounds} rounds the median ratio.",
        )
        lines += [
            "",
            "| forward | one rank (ms) | two ranks (ms) | ratio | telling (µs) | sums and joins, with waiting (ms) |"
            " ratio without both |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, (num_rows, num_new) in FORWARDS.items():
            whole, halves = forward_of(alone, num_rows, num_new), forward_of(cut, num_rows, num_new)
            rounds = []
            for _ in range(args.rounds):
                one_s = median_s(lambda batch=whole: alone.forward(batch), seconds=args.seconds)  # type: ignore[misc]
                parts.clear()
                two_s = median_s(lambda batch=halves: cut.forward(batch), seconds=args.seconds)  # type: ignore[misc]
                num_forwards = parts.num_sums / (2 * alone.num_layers)
                rounds.append(
                    (one_s / two_s, one_s, two_s, parts.begin_s / num_forwards, parts.together_s / num_forwards)
                )
            ratio, one_s, two_s, begin_s, together_s = sorted(rounds)[len(rounds) // 2]
            lines.append(
                f"| {name} | {one_s * 1e3:.1f} | {two_s * 1e3:.1f} | {ratio:.2f} | {begin_s * 1e6:.0f}"
                f" | {together_s * 1e3:.2f}, {parts.num_sums / num_forwards:.0f} sums"
                f" | {one_s / (two_s - begin_s - together_s):.2f} |"
            )
    table = "\n".join(lines)
    print(table)
    if not args.no_save:
        BenchmarkRun.of("ranks").save("ranks", table)


if __name__ == "__main__":
    main()
