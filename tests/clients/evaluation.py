"""Runs small tasks of lm-eval through a gateway, and compares what lm-eval finds with what transformers computes.

python -m tests.clients.evaluation PYTHON BASE_URL

PYTHON is the interpreter that has lm-eval. transformers runs in this process, so the clients need no PyTorch. The
gateway must serve the demo model in float32. Prints a line for each task; a difference raises AssertionError.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from common.checkpoints.demo_model import ensure_demo_model
from tests.support.reference import generate_greedily, prompt_logprobs

TASKS = Path(__file__).parent / "evaluation_tasks"
TOLERANCE = 1e-3
TIMEOUT_S = 600.0
QUIET = {"LMEVAL_LOG_LEVEL": "ERROR", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The results of lm-eval for a task: each document with its requests and answers, and the task's metrics."""

    samples: Sequence[dict[str, Any]]
    metrics: dict[str, Any]


def main() -> None:
    python, base_url = sys.argv[1:]
    disable_progress_bar()
    model = ensure_demo_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = evaluate(python, base_url, model, ["choices", "answers"])
    print("lm-eval, choices:", compare_choices(found["choices"], model, tokenizer))
    print("lm-eval, answers:", compare_answers(found["answers"], model, tokenizer))


def evaluate(python: str, base_url: str, model: Path, tasks: Sequence[str]) -> dict[str, Finding]:
    """Runs the tasks with lm-eval's `local-completions`, several prompts a request. Raises CalledProcessError."""
    model_args = {"model": "demo", "base_url": f"{base_url}/completions", "tokenizer": model, "max_length": 8192}
    options = {
        "model": "local-completions",
        "model_args": ",".join(f"{name}={value}" for name, value in model_args.items()),
        "tasks": ",".join(tasks),
        "include_path": ".",
        "batch_size": 4,
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [python, "-m", "lm_eval", "run", *flags, "--output_path", directory, "--log_samples"],
            cwd=TASKS,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": directory, **QUIET},
            stdout=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=True,
        )
        (results,) = Path(directory).glob("*/results_*.json")
        metrics = json.loads(results.read_text())["results"]
        found = {}
        for task in tasks:
            (samples,) = Path(directory).glob(f"*/samples_{task}_*.jsonl")
            found[task] = Finding([json.loads(line) for line in samples.open()], metrics[task])
        return found


def compare_choices(found: Finding, model: Path, tokenizer: Any) -> str:
    """Compares each choice's log-likelihood, whether it is the greedy continuation, and which documents are right."""
    differences, greedy, right = [], [], []
    for sample in found.samples:
        totals = []
        for arguments, ((total, is_greedy),) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            context = tokenizer.encode(arguments["arg_0"])
            whole = tokenizer.encode(arguments["arg_0"] + arguments["arg_1"])
            choice = torch.tensor(whole[len(context) :])
            logprobs = prompt_logprobs(model, whole)[len(context) - 1 :]
            totals.append(float(logprobs.gather(1, choice[:, None]).sum()))
            differences.append(abs(float(total) - totals[-1]))
            assert differences[-1] < TOLERANCE, f"{arguments}: {total}, not {totals[-1]}"
            greedy.append(bool((logprobs.argmax(dim=-1) == choice).all()))
            assert is_greedy == str(greedy[-1]), f"{arguments}: is_greedy is {is_greedy}"
        right.append(totals.index(max(totals)) == int(sample["target"]))
        assert sample["acc"] == right[-1], sample
    score = found.metrics["acc,none"]
    assert score == mean(right)
    assert 0 < score < 1 and {*greedy} == {True, False}, "the documents tell too little"
    return f"acc {score:.2f}, {len(differences)} log-likelihoods within {max(differences):.1e}"


def compare_answers(found: Finding, model: Path, tokenizer: Any) -> str:
    """Compares each document's generated text, and which texts are the wanted ones."""
    right = []
    for sample in found.samples:
        (arguments,) = sample["arguments"].values()
        prompt, options = tokenizer.encode(arguments["arg_0"]), arguments["arg_1"]
        (stop,) = options["until"]
        output = generate_greedily(model, prompt, options["max_gen_toks"], eos_token_id=tokenizer.eos_token_id)
        text = tokenizer.decode(output.token_ids, skip_special_tokens=True).split(stop)[0]
        assert sample["resps"] == [[text]], f"{arguments}: {sample['resps']}, not {text!r}"
        right.append(text == sample["target"])
        assert sample["exact_match"] == right[-1], sample
    score = found.metrics["exact_match,none"]
    assert score == mean(right)
    assert 0 < score < 1, "the documents tell too little"
    return f"exact_match {score:.2f}, {len(right)} texts are the same"


if __name__ == "__main__":
    main()
