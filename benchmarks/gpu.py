"""Measures decoding on a GPU against bounds: a model of Llama-3-8B's shape with random weights, in bfloat16.

    weights   a step of one row, compared with reading the weights once at the memory bandwidth, measured in this run
    gaps      64 rows: the time on the stream between one forward and the next
    local     64 rows: the longest step while the decode engine computes a short prompt itself, by the prompt's length
    peer      64 rows: tokens/s compared with transformers' continuous batching on the same weights, in this run
    handoff   KV from one pool to the other on this host, for a shape that computes little

Both engines run in one process, and the handoff does not use gRPC. A step's time is the wall time from one step to the
next, in a run of steps without prefill. Writes a table into benchmarks/results. The exit status is 1 when a bound is
missed. `--tiny` tries everything with a small shape, on any device, without bounds.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.ceilings import bandwidth_bytes_per_s
from common.device.factory import open_device
from common.device.stream import Event
from common.model.loader import DTYPES, target_of
from common.model.target import TargetModel
from common.model.traits import PROBE_NAME
from common.rpc.grpc_options import MAX_SEGMENT_BYTES
from common.sampling.params import ResolvedSampling
from common.service.cpu_engine import cpu_engine
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.forward.future_map import FutureMap
from decode_service.forward.worker import WorkerOutput
from tests.support.pair import InProcessPair, PairOptions

MIN_OF_BANDWIDTH, MAX_GAP, MIN_OF_PEER = 0.85, 0.02, 3.0
DTYPE = "bfloat16"
NUM_WARM_STEPS = 16
NUM_LOCAL_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the benchmark. `handoff_config` is a model with as much KV as `config`, but narrow layers."""

    config: LlamaConfig
    handoff_config: LlamaConfig
    prompt_len: int
    new_tokens: int
    num_rows: int
    handoff_rows: int
    handoff_len: int
    bandwidth_bytes: int
    local_lens: tuple[int, ...]


def llama(**sizes: int) -> LlamaConfig:
    return LlamaConfig(**sizes, rms_norm_eps=1e-5, tie_word_embeddings=False)  # type: ignore[arg-type]


FULL = Sizes(
    config=llama(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_position_embeddings=8192,
    ),
    handoff_config=llama(
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=32,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=1024,
        max_position_embeddings=8192,
    ),
    prompt_len=128,
    new_tokens=256,
    num_rows=64,
    handoff_rows=8,
    handoff_len=4096,
    bandwidth_bytes=4 << 30,
    local_lens=(32, 64, 128, 256, 512),
)
_TINY = llama(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
    max_position_embeddings=512,
)
TINY = Sizes(_TINY, _TINY, 8, 40, 4, 2, 64, 1 << 24, (4, 8))


@dataclass
class Clock:
    """Records events on the forward stream at the start and end of each decode forward."""

    marks: list[tuple[Event, Event]] = field(default_factory=list)

    def watch(self, pair: InProcessPair) -> None:
        worker, stream = pair.decode._worker, pair.decode._forward_stream
        forward = worker.forward

        def marked(batch: ForwardBatch, *, future_map: FutureMap, scope: Any, on_publish: Any) -> WorkerOutput:
            begin = stream.record(scope)
            output = forward(batch, future_map=future_map, scope=scope, on_publish=on_publish)
            self.marks.append((begin, stream.record(scope)))
            return output

        worker.forward = marked  # type: ignore[method-assign]

    def forward_s(self) -> list[float]:
        return [end.seconds_since(begin) for begin, end in self.marks]

    def gap_s(self) -> list[float]:
        return [begin.seconds_since(end) for (_, end), (begin, _) in zip(self.marks, self.marks[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Decoded:
    """The timing of a run of steps in which all rows decoded and nothing else was done. Times are medians."""

    step_s: float
    forward_s: float
    gap_s: float
    tokens_per_s: float


def prompts(num_rows: int, length: int, vocab_size: int, wave: str = "") -> list[list[int]]:
    """Returns random prompts. Equal arguments give equal prompts; prompts of different waves have nothing in common."""
    numbers = random.Random(f"{num_rows} {wave}")
    return [[numbers.randrange(vocab_size) for _ in range(length)] for _ in range(num_rows)]


def in_process(target: TargetModel, sizes: Sizes, num_rows: int, length: int, device: str, **options: Any) -> Any:
    num_tokens = num_rows * (length + 1)
    return InProcessPair(
        target,
        new_device=lambda: open_device(device, num_threads=1),
        options=replace(
            PairOptions(
                prefill_rows=num_rows,
                decode_rows=num_rows,
                prefill_tokens=num_tokens,
                decode_tokens=num_tokens,
                context_tokens=length,
                chunk_tokens=2048,
                max_batch_tokens=8192,
                send_budget_bytes=1 << 30,
                receive_budget_bytes=1 << 30,
                max_segment_bytes=MAX_SEGMENT_BYTES,
                debug_checks=False,
            ),
            **options,
        ),
    )


def decode(target: TargetModel, sizes: Sizes, num_rows: int, device: str) -> Decoded:
    pair = in_process(target, sizes, num_rows, sizes.prompt_len + sizes.new_tokens, device)
    try:
        # Steps are measured from when every row has decoded some tokens until the first row has finished.
        outcomes = [
            pair.submit(str(i), ids, ResolvedSampling(seed=i, max_tokens=sizes.new_tokens, temperature=0.0))
            for i, ids in enumerate(prompts(num_rows, sizes.prompt_len, target.vocab_size))
        ]
        pair.run(bound_s=600.0, until=lambda: all(len(outcome.token_ids) > NUM_WARM_STEPS for outcome in outcomes))
        clock = Clock()
        clock.watch(pair)
        num_before = sum(len(outcome.token_ids) for outcome in outcomes)
        ended_s = [time.perf_counter()]
        while not any(outcome.has_ended for outcome in outcomes):
            pair.step_decode()
            ended_s.append(time.perf_counter())
        num_tokens = sum(len(outcome.token_ids) for outcome in outcomes) - num_before
        pair.run(bound_s=600.0)
        num_steps = len(ended_s) - 1
        clock.marks = clock.marks[1:num_steps]
        return Decoded(
            step_s=statistics.median(after - before for before, after in itertools.pairwise(ended_s[1:])),
            forward_s=statistics.median(clock.forward_s()),
            gap_s=statistics.median(clock.gap_s()),
            tokens_per_s=num_tokens / (ended_s[-1] - ended_s[0]),
        )
    finally:
        pair.close()


def steps_beside_local_prompts(target: TargetModel, sizes: Sizes, device: str) -> dict[int, tuple[float, float]]:
    """Computes short prompts in the decode engine, one after the other, while `num_rows` rows decode.

    Returns for each length, in seconds, the longest step beside such a prompt and the time to its first token: medians
    over the prompts of that length, of which the first does not count.
    """
    num_new = 2 * sizes.new_tokens  # enough for the steps of all prompts
    length = max(sizes.prompt_len + num_new, max(sizes.local_lens) + 1)
    pair = in_process(
        target,
        sizes,
        sizes.num_rows,
        length,
        device,
        decode_rows=sizes.num_rows + 1,
        decode_tokens=(sizes.num_rows + 1) * (length + 1),
        local_prefill_tokens=max(sizes.local_lens),
    )
    try:
        outcomes = [
            pair.submit(str(i), ids, ResolvedSampling(seed=i, max_tokens=num_new, temperature=0.0))
            for i, ids in enumerate(prompts(sizes.num_rows, sizes.prompt_len, target.vocab_size))
        ]
        pair.run(bound_s=600.0, until=lambda: all(len(outcome.token_ids) > NUM_WARM_STEPS for outcome in outcomes))
        times_s: dict[int, list[tuple[float, float]]] = {length: [] for length in sizes.local_lens}
        for length, times in times_s.items():
            for i, ids in enumerate(prompts(NUM_LOCAL_PROMPTS, length, target.vocab_size, f"local {length}")):
                began_s = time.perf_counter()
                asked = pair.submit(f"{length}-{i}", ids, ResolvedSampling(seed=i, max_tokens=1, temperature=0.0))
                ended_s = [began_s]
                while not asked.has_ended:
                    pair.step_decode()
                    ended_s.append(time.perf_counter())
                assert asked.finished is not None and asked.finished.timings.num_handoff_attempts == 0, asked
                longest_s = max(after - before for before, after in itertools.pairwise(ended_s))
                times.append((longest_s, ended_s[-1] - began_s))
        assert not any(outcome.has_ended for outcome in outcomes), "a row ended while prompts were computed"
        pair.run(bound_s=600.0)
        return {
            length: (
                statistics.median(step_s for step_s, _ in times[1:]),
                statistics.median(ttft for _, ttft in times[1:]),
            )
            for length, times in times_s.items()
        }
    finally:
        pair.close()


def end_to_end_s(target: TargetModel, sizes: Sizes, device: str) -> float:
    """Returns the seconds from the first submitted prompt to the last token of all rows.

    A first wave, which is not measured, compiles the kernels and records the CUDA graphs.
    """
    pair = in_process(target, sizes, sizes.num_rows, sizes.prompt_len + sizes.new_tokens, device)
    try:
        for name in ("warm", "timed"):
            began_s = time.perf_counter()
            for i, ids in enumerate(prompts(sizes.num_rows, sizes.prompt_len, target.vocab_size, name)):
                sampling = ResolvedSampling(seed=i, max_tokens=sizes.new_tokens, temperature=0.0)
                pair.submit(f"{name}-{i}", ids, sampling)
            pair.run(bound_s=600.0)
        return time.perf_counter() - began_s
    finally:
        pair.close()


def peer_s(model: Any, sizes: Sizes) -> float:
    """Returns the seconds from the first prompt's arrival to the last token in transformers' continuous batching.

    A first wave, which is not measured, creates the manager with its cache and graphs; its thread is then running
    already. The waves have different prompts, because the manager may keep the KV of earlier ones.
    """
    generation = GenerationConfig(max_new_tokens=sizes.new_tokens, do_sample=False, eos_token_id=-1)
    try:
        for wave in ("warm", "timed"):
            ids = prompts(sizes.num_rows, sizes.prompt_len, model.config.vocab_size, wave)
            outputs = model.generate_batch(
                ids, generation_config=generation, progress_bar=False, persistent_manager=True
            ).values()
            lengths = {len(output.generated_tokens) for output in outputs}
            assert len(outputs) == len(ids) and lengths == {sizes.new_tokens}, f"the peer stopped early: {lengths}"
        return float(max(output.lifespan[1] for output in outputs) - min(output.created_time for output in outputs))
    finally:
        model.destroy_cached_continuous_batching_manager()


def handoff_bytes_per_s(target: TargetModel, sizes: Sizes, device: str) -> float:
    """Returns the rate of a handoff, from the first segment's arrival until the KV of all rows has arrived.

    The second of two waves is measured.
    """
    pair = in_process(target, sizes, sizes.handoff_rows, sizes.handoff_len + 1, device)
    group = target.layer_group
    arrived_s: list[float] = []

    def note(frame: Any) -> list[Any]:
        arrived_s.append(time.perf_counter())
        return [frame]

    pair.tamper = note
    try:
        for name in ("warm", "timed"):
            arrived_s.clear()
            for i, ids in enumerate(prompts(sizes.handoff_rows, sizes.handoff_len, target.vocab_size)):
                pair.submit(f"{name}-{i}", ids, ResolvedSampling(seed=i, max_tokens=1, temperature=0.0))
            pair.run(bound_s=600.0)
            seconds = time.perf_counter() - arrived_s[0]
        return sizes.handoff_rows * sizes.handoff_len * group.token_bytes / seconds
    finally:
        pair.close()


def random_model(config: LlamaConfig, device: str, attention: str) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, attn_implementation=attention, dtype=DTYPES[DTYPE])
    return model.eval().requires_grad_(False)


def step_bytes(model: Any) -> int:
    """Returns the bytes of weights that a step reads: all but the embedding, of which it reads one row per token."""
    held = sum(weight.nbytes for weight in model.parameters())
    return int(held - model.get_input_embeddings().weight.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="rehearse with a small shape; nothing is saved")
    parser.add_argument("--no-peer", action="store_true", help="leave transformers' continuous batching out")
    args = parser.parse_args()
    sizes = TINY if args.tiny else FULL
    bandwidth = bandwidth_bytes_per_s(args.device, sizes.bandwidth_bytes)
    model = random_model(sizes.config, args.device, PROBE_NAME)
    num_bytes = step_bytes(model)
    engine = cpu_engine(torch.device(args.device))  # None but in a rehearsal
    target = target_of(model, name="8B", device=args.device, dtype=DTYPE, cpu_engine=engine)
    one = decode(target, sizes, 1, args.device)
    many = decode(target, sizes, sizes.num_rows, args.device)
    local = steps_beside_local_prompts(target, sizes, args.device)
    run_s = end_to_end_s(target, sizes, args.device)
    del model, target
    of_peer = None
    if not args.no_peer:
        of_peer = peer_s(random_model(sizes.config, args.device, "sdpa"), sizes) / run_s
    narrow = target_of(
        random_model(sizes.handoff_config, args.device, PROBE_NAME),
        name="KV",
        device=args.device,
        dtype=DTYPE,
        cpu_engine=engine,
    )
    handoff = handoff_bytes_per_s(narrow, sizes, args.device)
    of_bandwidth = num_bytes / bandwidth / one.step_s
    gap = many.gap_s / many.step_s
    run = BenchmarkRun.of("gpu")
    num_tokens = sizes.num_rows * sizes.new_tokens
    is_met = True

    def bound(text: str, *, met: bool) -> str:
        """Returns a text that says whether the bound is met, and records it for the exit status. With `--tiny` no bound
        counts.
        """
        nonlocal is_met
        is_met &= met
        return text if args.tiny else f"{text}: {'met' if met else 'MISSED'}"

    lines = [
        *run.heading(
            "Decode on a GPU",
            f"{sizes.config.num_hidden_layers} layers of {sizes.config.hidden_size}, random weights, {DTYPE}, prompts "
            f"of {sizes.prompt_len} tokens and {sizes.new_tokens} new ones, both engines in one process.",
        ),
        "",
        "| figure | value | bound |",
        "|---|---|---|",
        f"| bandwidth measured | {bandwidth / 1e9:.0f} GB/s | |",
        f"| weights that a step reads | {num_bytes / 1e9:.2f} GB | |",
        f"| step of 1 row | {1e3 * one.step_s:.3f} ms, {1e3 * one.forward_s:.3f} of it the forward | |",
        f"| its weights over bandwidth, of the step | {of_bandwidth:.1%} "
        f"| {bound(f'at least {MIN_OF_BANDWIDTH:.0%}', met=of_bandwidth >= MIN_OF_BANDWIDTH)} |",
        f"| step of {sizes.num_rows} rows | {1e3 * many.step_s:.3f} ms, {many.tokens_per_s:.0f} tokens/s | |",
        f"| between forwards, of the step | {1e6 * many.gap_s:.0f} µs, {gap:.1%} "
        f"| {bound(f'under {MAX_GAP:.0%}', met=gap < MAX_GAP)} |",
        *(
            f"| longest step of {sizes.num_rows} rows beside a local prompt of {length} tokens "
            f"| {1e3 * step_s:.1f} ms; its first token after {1e3 * ttft_s:.1f} ms | |"
            for length, (step_s, ttft_s) in local.items()
        ),
        f"| {sizes.num_rows} rows from prompts to the end | {num_tokens / run_s:.0f} tokens/s | |",
        *(
            [
                f"| against transformers' continuous batching | {of_peer:.2f} times "
                f"| {bound(f'at least {MIN_OF_PEER:.0f} times', met=of_peer >= MIN_OF_PEER)} |"
            ]
            if of_peer is not None
            else ["| against transformers' continuous batching | not run | |"]
        ),
        f"| handoff in this process | {handoff / 1e9:.2f} GB/s | |",
    ]
    table = "\n".join(lines)
    print(table)
    if args.tiny:
        return
    run.save("gpu", table)
    sys.exit(0 if is_met else 1)


if __name__ == "__main__":
    main()
