"""Measures the prefill engine alone: tokens/s of one prompt at a time, the best possible rate, and the time by
operator.

Other benchmarks run it as a process of its own: `python -m benchmarks.prefill_forward --prompts 512,2048 --threads 2`
prints one JSON object. `--by-operators` computes by PyTorch operators instead of the fused forward. `--profile` prints
the time of each operator instead, for one forward of each prompt.
"""

from __future__ import annotations

from common.host.cores import spin_briefly

spin_briefly()  # must come before torch is imported, as in the services

import argparse  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
import time  # noqa: E402

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from baton_cpu.blocks.linear import PackedLinear, can_pack  # noqa: E402
from baton_cpu.compiler.kernel_cache import keep_kernels  # noqa: E402
from baton_cpu.program.fusing import fuse  # noqa: E402
from benchmarks.machine import demo_model_dir  # noqa: E402
from benchmarks.model_costs import ModelCosts  # noqa: E402
from common.checkpoints.cache import kernels_cache_dir  # noqa: E402
from common.device.factory import open_device  # noqa: E402
from common.sampling.params import ResolvedSampling  # noqa: E402
from common.wire.handoff import HandoffRow, KvSegment, PrebuiltBatch  # noqa: E402
from prefill_service.messages import BytesSent, CallDone, Event, FrameReady, OpenCall  # noqa: E402
from prefill_service.schedule.scheduler import PrefillEngine  # noqa: E402
from tests.support.engines import Received, new_prefill_engine  # noqa: E402
from tests.support.loading import load_target  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", default="512,2048", help="lengths in tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--by-operators", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    lengths = [int(length) for length in args.prompts.split(",")]
    torch.set_num_threads(1)
    keep_kernels(kernels_cache_dir())
    model_dir = demo_model_dir()
    model = load_target(model_dir, device="cpu", dtype="bfloat16", fuses=not args.by_operators)
    max_batch_tokens = max(2048, args.chunk_tokens)
    if not args.by_operators:
        fuse(model, num_threads=args.threads, max_tokens=max_batch_tokens)
    device = open_device("cpu", num_threads=args.threads)
    received: Received[Event] = Received()
    engine = new_prefill_engine(
        model,
        device,
        outbox=received,
        max_rows=2,
        max_kv_tokens=2 * max(lengths),
        max_context_tokens=max(lengths),
        chunk_tokens=args.chunk_tokens,
        max_batch_tokens=max_batch_tokens,
        debug_checks=False,
    )
    try:
        compute_prompt(engine, received, "warm-up", max(lengths))
        if args.profile:
            for length in lengths:
                with profile(activities=[ProfilerActivity.CPU]) as seen:
                    compute_prompt(engine, received, f"profiled-{length}", length)
                print(seen.key_averages().table(sort_by="self_cpu_time_total", row_limit=12))
            return
        costs = ModelCosts.of(model_dir, dtype="bfloat16", kv_bytes_per_token=model.layer_group.token_bytes)
        flops_per_s = matmul_flops_per_s(costs, args.threads)
        rows = []
        for length in lengths:
            times_s = [compute_prompt(engine, received, f"{length}-{run}", length) for run in range(args.runs)]
            rows.append(
                {
                    "prompt_tokens": length,
                    "tokens_per_s": length / min(times_s),
                    "bound_tokens_per_s": length * flops_per_s / prompt_flops(costs, length),
                }
            )
        print(json.dumps({"threads": args.threads, "matmul_flops_per_s": flops_per_s, "rows": rows}))
    finally:
        engine.close()
        device.close(10.0)


def compute_prompt(engine: PrefillEngine, received: Received[Event], call_id: str, num_tokens: int) -> float:
    """Computes a prompt and waits until all its KV is sent. `received` is the engine's outbox.

    Returns the seconds from the prompt's arrival to its PrebuiltBatch, the message with its first token.
    """
    numbers = random.Random(call_id)
    token_ids = tuple(numbers.randrange(100, 49_000) for _ in range(num_tokens))
    row = HandoffRow(call_id, 0, token_ids, num_tokens, ResolvedSampling(seed=0, max_tokens=1))
    began_s = time.perf_counter()
    engine.step([OpenCall(call_id, (row,))])
    took_s = 0.0
    while True:
        sent = []
        for event in received.take():
            match event:
                case FrameReady(_, PrebuiltBatch()):
                    took_s = time.perf_counter() - began_s
                case FrameReady(_, KvSegment() as segment):
                    sent.append(BytesSent(call_id, segment.num_bytes))
                case CallDone():
                    engine.step(sent)
                    return took_s
        time.sleep(min(0.001, engine.idle_timeout_s()))
        engine.step(sent)


def prompt_flops(costs: ModelCosts, num_tokens: int) -> float:
    """Returns the operations of a prompt: the layers' matrix products, and causal attention.

    In causal attention each token attends itself and all tokens before it.
    """
    return costs.num_prefill_flops(num_tokens=num_tokens, num_attended=num_tokens * (num_tokens + 1) // 2)


def matmul_flops_per_s(costs: ModelCosts, num_threads: int) -> float:
    """Measures the best rate of matrix products, in operations per second.

    It runs linear layers with the sizes of the model's MLP over 512 tokens, with packed weights: in bfloat16 if the CPU
    can multiply that, else in float32.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    dtype = torch.bfloat16 if can_pack(torch.ones((2, 2), dtype=torch.bfloat16)) else torch.float32
    num_in, num_out = costs.hidden_size, costs.intermediate_size
    rates = []
    with torch.inference_mode():
        layers = [PackedLinear(torch.nn.Linear(num_in, num_out, bias=False, dtype=dtype)) for _ in range(30)]
        x = torch.randn((512, num_in), dtype=dtype)
        for _ in range(6):
            began_s = time.perf_counter()
            for layer in layers:
                layer(x)
            rates.append(len(layers) * 2.0 * 512 * num_in * num_out / (time.perf_counter() - began_s))
    torch.set_num_threads(before)
    return max(rates)


if __name__ == "__main__":
    main()
