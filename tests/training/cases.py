"""Training data for tests: tiny targets, and conversations sampled from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tests.support.models import next_token_logits
from training.config import TrainConfig
from training.data import Conversations
from training.progress import ConsoleProgress

LAYERS = (0, 1, 1)
"""The layers whose states a head reads, for a target with two layers."""


QUESTION_LIMIT = 128
"""The most tokens of a question that `self-chat` lets the model write."""


def arrays(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return {name: file[name].tolist() for name in file.files}


def save_data(path: Path, **changes: Any) -> Path:
    """Saves three conversations, of 4, 5 and 6 tokens, to a file. `changes` replace arrays of the file; None removes
    one.
    """
    arrays = {
        "tokens": np.arange(15, dtype=np.uint16),
        "offsets": np.array([0, 4, 9, 15]),
        "answer_start": np.array([1, 2, 3], dtype=np.int32),
        **changes,
    }
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def save_sampled_data(path: Path, target_dir: Path, *, num_conversations: int, seed: int = 0) -> Path:
    """Saves conversations sampled from a target whose next token depends on the last one only. They have prompts of 4
    tokens and 16 to 32 tokens in all.
    """
    random = np.random.default_rng(seed)
    logits = next_token_logits(target_dir).double()
    cumulated = logits.softmax(-1).cumsum(-1).numpy()
    conversations = []
    for _ in range(num_conversations):
        tokens = [int(random.integers(len(cumulated)))]
        while len(tokens) < 16 + random.integers(17):
            tokens.append(min(int(np.searchsorted(cumulated[tokens[-1]], random.random())), len(cumulated) - 1))
        conversations.append(tokens)
    return save_data(
        path,
        tokens=np.concatenate(conversations).astype(np.uint16),
        offsets=np.cumsum([0, *map(len, conversations)]),
        answer_start=np.full(num_conversations, 4, dtype=np.int32),
    )


def make_conversations(texts: Sequence[Sequence[int]], answer_start: Sequence[int]) -> Conversations:
    return Conversations(
        np.concatenate([np.array(text, dtype=np.int64) for text in texts]),
        np.cumsum([0, *map(len, texts)]),
        np.array(answer_start, dtype=np.int64),
    )


def tiny_config(**changes: Any) -> TrainConfig:
    """Returns a config for the conversations of `save_sampled_data`, with an evaluation every 1000 tokens."""
    settings: dict[str, Any] = {
        "layers": LAYERS,
        "draft_vocab": 48,
        "batch_tokens": 512,
        "max_tokens": 4000,
        "warmup_tokens": 400,
        "eval_tokens": 1000,
        "num_held_out": 20,
        "lr": 5e-3,
        "checkpoint_minutes": 1e6,
    }
    return TrainConfig(**{**settings, **changes})


def quiet() -> ConsoleProgress:
    return ConsoleProgress(Console(quiet=True))
