"""Measures transformers' `generate` on the same weights, as the reference for Baton's rates: one request at a time, or
`--batch` of them in one call.

It runs as a process of its own, so that the two share no process, allocator or thread pool: `python -m
benchmarks.reference_generate MODEL_DIR PROMPTS.json --new-tokens 128` prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class TokenClock(BaseStreamer):
    """Records when each step's tokens arrive. `generate` passes the prompts first, which is not recorded."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self.times_s.append(time.perf_counter())
        self._has_prompt = True

    def end(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("prompts", type=Path, help="a JSON list of lists of token ids, all of the same length")
    parser.add_argument("--batch", type=int, default=1, help="prompts of one call")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(
        args.model_dir, trust_remote_code=False, dtype=getattr(torch, args.dtype)
    ).eval()
    generate(model, [[1, 2, 3]], 4)
    prompts: list[list[int]] = json.loads(args.prompts.read_text())
    batches = [prompts[first : first + args.batch] for first in range(0, len(prompts), args.batch)]
    runs = [generate(model, batch, args.new_tokens) for batch in batches]
    decode_s = sum(run.times_s[-1] - run.times_s[0] for run in runs)
    wall_s = sum(run.times_s[-1] - run.start_s for run in runs)
    print(
        json.dumps(
            {
                "num_requests": len(prompts),
                "batch": args.batch,
                "decode_tokens_per_s": len(prompts) * (args.new_tokens - 1) / decode_s,
                "tokens_per_s": len(prompts) * args.new_tokens / wall_s,
                "ttft_s": [run.times_s[0] - run.start_s for run in runs],
                "gaps_s": [after - before for run in runs for before, after in pairwise(run.times_s)],
            }
        )
    )


@dataclass(frozen=True, slots=True)
class Run:
    start_s: float
    times_s: list[float]


def generate(model: Any, prompts: list[list[int]], new_tokens: int) -> Run:
    clock = TokenClock()
    ids = torch.tensor(prompts)
    start_s = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        streamer=clock,
    )
    assert len(clock.times_s) == new_tokens, f"{len(clock.times_s)} tokens came, {new_tokens} were asked for"
    return Run(start_s, clock.times_s)


if __name__ == "__main__":
    main()
