"""transformers `generate` on the same weights, one request at a time: what Baton's rates are set against.

Run as a process of its own, so that neither side shares a process, an allocator or a thread pool with the other:
`python -m benchmarks.reference_generate MODEL_DIR PROMPTS.json --new-tokens 128` prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class TokenClock(BaseStreamer):
    """Notes when each token arrives; the prompt comes first and is left out."""

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
    parser.add_argument("prompts", type=Path, help="a JSON list of lists of token ids")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model_dir, dtype=getattr(torch, args.dtype)).eval()
    generate(model, [1, 2, 3], 4)
    runs = [generate(model, prompt, args.new_tokens) for prompt in json.loads(args.prompts.read_text())]
    decode_s = sum(run["decode_s"] for run in runs)
    wall_s = sum(run["wall_s"] for run in runs)
    print(
        json.dumps(
            {
                "num_requests": len(runs),
                "decode_tokens_per_s": len(runs) * (args.new_tokens - 1) / decode_s,
                "tokens_per_s": len(runs) * args.new_tokens / wall_s,
                "ttft_s": [run["ttft_s"] for run in runs],
                "gaps_s": [gap for run in runs for gap in run["gaps_s"]],
            }
        )
    )


def generate(model: torch.nn.Module, prompt: list[int], new_tokens: int) -> dict[str, object]:
    clock = TokenClock()
    ids = torch.tensor([prompt])
    start_s = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        streamer=clock,
    )
    times = clock.times_s
    assert len(times) == new_tokens, f"{len(times)} tokens came, {new_tokens} were asked for"
    return {
        "ttft_s": times[0] - start_s,
        "decode_s": times[-1] - times[0],
        "wall_s": times[-1] - start_s,
        "gaps_s": [b - a for a, b in zip(times, times[1:], strict=False)],
    }


if __name__ == "__main__":
    main()
