"""Measures how much disaggregation adds to the time to the first token: a pair compared with both engines in one
process.

Each round sends a prompt first to one and then to the other, in alternating order. The pair is two services, called
through the gRPC client. The single process runs the same engines with a service's settings and an in-process handoff,
but without client, server and sockets, so that all of those count against the pair. The exit status is 1 if the pair
takes longer by more than a tenth of the prefill time, in the median over rounds.
"""

from __future__ import annotations

from common.host.cores import spin_briefly

spin_briefly()  # must come before torch is imported, as in the services

import argparse  # noqa: E402
import asyncio  # noqa: E402
import gc  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from functools import partial  # noqa: E402

import torch  # noqa: E402

from baton.client import AsyncClient  # noqa: E402
from baton.load_generator import RequestRecord, Workload, run_workload  # noqa: E402
from baton_cpu.compiler.kernel_cache import keep_kernels  # noqa: E402
from baton_cpu.program.fusing import fuse  # noqa: E402
from benchmarks.benchmark_run import BenchmarkRun  # noqa: E402
from benchmarks.full_speed_pair import full_speed_pair  # noqa: E402
from benchmarks.machine import demo_model_dir  # noqa: E402
from common.checkpoints.cache import kernels_cache_dir  # noqa: E402
from common.device.factory import open_device  # noqa: E402
from common.host.cores import (  # noqa: E402
    num_compute_threads,
    set_own_num_threads,
    switch_threads_early,
)
from common.host.memory import keep_freed_memory  # noqa: E402
from common.rpc.grpc_options import MAX_SEGMENT_BYTES  # noqa: E402
from common.sampling.params import ResolvedSampling  # noqa: E402
from tests.support.loading import load_target  # noqa: E402
from tests.support.pair import InProcessPair, PairOptions  # noqa: E402

MAX_SHARE = 0.1
MAX_BATCH_TOKENS = 2048
NEW_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Round:
    """The results of one round in seconds. `prefill_s` and `transfer_s` are stages of the pair's request."""

    pair_s: float
    one_process_s: float
    prefill_s: float
    transfer_s: float

    @property
    def share(self) -> float:
        return (self.pair_s - self.one_process_s) / self.prefill_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=0, help="of the prefill forwards; 0: the service's default")
    parser.add_argument("--late-sending", action="store_true", help="KV leaves behind its chunk, not layer by layer")
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    num_threads = num_compute_threads(args.threads, 1.0)
    max_tokens = args.prompt_tokens + 64
    gc.freeze()  # this and the next lines do what the services do after their imports
    keep_freed_memory()
    switch_threads_early()
    torch.set_num_threads(1)
    keep_kernels(kernels_cache_dir())
    model = load_target(demo_model_dir(), device="cpu", dtype="bfloat16", fuses=True)
    # Shared by both engines, because with one request they never compute at the same time.
    fuse(model, num_threads=num_threads, max_tokens=MAX_BATCH_TOKENS)
    one_process = InProcessPair(
        model,
        new_device=lambda: open_device("cpu", num_threads=num_threads),
        options=PairOptions(
            prefill_rows=1,
            prefill_tokens=max_tokens,
            decode_rows=1,
            decode_tokens=max_tokens,
            context_tokens=max_tokens,
            chunk_tokens=512,
            max_batch_tokens=MAX_BATCH_TOKENS,
            send_budget_bytes=64 << 20,
            receive_budget_bytes=64 << 20,
            max_segment_bytes=MAX_SEGMENT_BYTES,
            debug_checks=False,
        ),
    )
    sizes = ("--max-kv-tokens", str(max_tokens))
    sending = ("--disabled-fast-paths=early_sending",) if args.late_sending else ()
    try:
        with full_speed_pair(
            model=str(demo_model_dir()),
            dtype="bfloat16",
            prefill_args=(*sizes, "--num-threads", str(num_threads), *sending),
            decode_args=sizes,
        ) as pair:
            rounds = asyncio.run(measure(pair.decode_addresses[0], one_process, args.rounds, args.prompt_tokens))
    finally:
        one_process.close()
    run = BenchmarkRun.of("ttft")
    share = statistics.median(each.share for each in rounds)
    table = render(run, rounds, share, num_threads=num_threads, num_tokens=args.prompt_tokens)
    print(table)
    if not args.no_save:
        run.save("ttft", table)
    sys.exit(0 if share <= MAX_SHARE else 1)


async def measure(address: str, one_process: InProcessPair, num_rounds: int, num_tokens: int) -> list[Round]:
    """Measures the rounds. One more round comes first as a warm-up and is not returned."""
    rounds = []
    async with AsyncClient(address) as client:
        vocab_size = (await client.model_info()).vocab_size
        for number in range(num_rounds + 1):
            workload = Workload(1, 1, num_tokens, NEW_TOKENS, prompt_seed=number)
            (prompt,) = workload.prompts(vocab_size)
            in_pair = partial(pair_record, client, workload, vocab_size)
            in_one_process = partial(one_process_ttft_s, one_process, str(number), prompt)
            if number % 2 == 0:
                record, one_process_s = await in_pair(), await in_one_process()
            else:
                one_process_s, record = await in_one_process(), await in_pair()
            assert record.timings is not None
            rounds.append(Round(record.ttft_s, one_process_s, record.timings.prefill_s, record.timings.transfer_s))
    return rounds[1:]


async def pair_record(client: AsyncClient, workload: Workload, vocab_size: int) -> RequestRecord:
    (record,) = await run_workload([client], workload, vocab_size=vocab_size)
    assert record.error is None, record.error
    return record


async def one_process_ttft_s(pair: InProcessPair, request_id: str, prompt: list[int]) -> float:
    return await asyncio.to_thread(first_token_s, pair, request_id, prompt)


def first_token_s(pair: InProcessPair, request_id: str, prompt: list[int]) -> float:
    set_own_num_threads(1)  # as in an engine's thread
    began_s = time.perf_counter()
    outcome = pair.submit(request_id, prompt, ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, temperature=0.0))
    pair.run(until=lambda: bool(outcome.token_ids) or outcome.has_ended)
    took_s = time.perf_counter() - began_s
    assert outcome.error is None, outcome.error
    pair.settle()
    return took_s


def render(run: BenchmarkRun, rounds: list[Round], share: float, *, num_threads: int, num_tokens: int) -> str:
    def median_ms(name: str) -> str:
        return f"{1e3 * statistics.median(getattr(each, name) for each in rounds):.0f}"

    verdict = "met" if share <= MAX_SHARE else "MISSED"
    shares = [each.share for each in rounds]
    lines = [
        *run.heading(
            "What disaggregation adds to TTFT",
            f"SmolLM2-135M-Instruct, bfloat16, {num_tokens}-token prompts, prefill on {num_threads} threads; "
            f"medians of {len(rounds)} rounds.",
        ),
        "",
        "| TTFT of the pair, ms | of both engines in one process, ms | prefill, ms | transfer after it, ms "
        "| difference / prefill | least, largest | bound |",
        "|---|---|---|---|---|---|---|",
        f"| {median_ms('pair_s')} | {median_ms('one_process_s')} | {median_ms('prefill_s')} "
        f"| {median_ms('transfer_s')} | {share:.3f} "
        f"| {min(shares):.3f}, {max(shares):.3f} "
        f"| <= {MAX_SHARE}: {verdict} |",
    ]
    if max(shares) < 0:
        lines += [
            "",
            "The pair was faster in every round: in the one process both engines, their streams and the client that "
            "waits have one interpreter between them.",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
