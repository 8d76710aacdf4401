"""Prepares a training run from a target model and conversations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from common.errors import ConfigError
from training.batches import BatchSource
from training.config import TrainConfig
from training.curves import require_matplotlib
from training.data import Conversations, Ints, join, load_conversations, split
from training.features import Features, FeaturesKey, compute_features, features_key, is_complete, open_features
from training.head import TrainableHead, initialize
from training.head_files import OUTPUT_LAYER, StartingHead, head_config, head_spec, read_starting_head
from training.objective import Objective
from training.progress import ConsoleProgress
from training.target import FrozenTarget, load_target
from training.trainer import Trainer, Workplace
from training.vocabulary import DraftVocabulary, most_frequent


def prepare_training(
    model_dir: Path,
    data: Sequence[Path],
    out: Path,
    *,
    config: TrainConfig,
    progress: ConsoleProgress,
    features_dir: Path | None = None,
    start_from: Path | None = None,
    revises_vocab: bool = False,
) -> Trainer:
    """Loads everything that a run needs, and returns its trainer. Computes the features first if they are missing.

    The run writes its head to `out`/head, and its checkpoints to `out`. The features, which may take longer to compute
    than anything else, go to `features_dir` (by default `out`/features).

      data            the files of conversations, at least one; they are put end to end
      start_from      a directory with a head of the same shape; the run starts with its weights and draft vocabulary
      revises_vocab   with `start_from`: choose the draft vocabulary from the data instead; new tokens get output rows
                      derived from the target's

    Raises ConfigError, naming the wrong setting, or the file and its array; StartupError and UnsupportedModel for a
    target that cannot be used.
    """
    require_matplotlib()
    if revises_vocab and start_from is None:
        raise ConfigError("revises_vocab: there is no head to start from")
    device = _device(config.device)
    _make_writable(out)
    torch.manual_seed(config.seed)
    target = load_target(model_dir, device=config.device)
    parts = [load_conversations(path, vocab_size=target.config.vocab_size) for path in data]
    conversations = join(parts)
    train, held_out = split(parts, data, num_held_out=config.num_held_out, seed=config.seed)
    _require_chains(conversations, held_out, config.ttt_steps)
    written_config = head_config(target.config, draft_vocab=config.draft_vocab, layers=config.layers)
    spec = head_spec(written_config, target.config, model_dir)
    starting = read_starting_head(start_from, written_config) if start_from else None
    vocabulary = (
        starting.vocabulary
        if starting and not revises_vocab
        else most_frequent(
            conversations.answer_tokens(train), draft_vocab=config.draft_vocab, vocab_size=target.config.vocab_size
        )
    )
    key = features_key(conversations, target, spec.captured_layers)
    features = _features(features_dir or out / "features", key, conversations, target, progress)

    dtype: torch.dtype = getattr(torch, config.dtype)
    token_ids = torch.from_numpy(vocabulary.token_ids)
    head = TrainableHead(spec, max_length=int(conversations.lengths.max()) + config.ttt_steps, dtype=dtype)
    origin = _begin(head, starting, target, vocabulary, seed=config.seed)
    progress.line(
        f"{len(train)} conversations to train on, {len(held_out)} held out; "
        f"{sum(weight.numel() for weight in head.parameters()) / 1e6:.1f} million weights, " + origin
    )
    head = head.to(device)
    objective = Objective(
        head, target.embedding, target.output_rows(token_ids.to(device)).to(dtype), num_steps=config.ttt_steps
    )
    source = BatchSource(
        conversations,
        features,
        draft_ids=vocabulary.draft_ids(),
        num_steps=config.ttt_steps,
        batch_tokens=config.batch_tokens,
        device=device,
    )
    identity = {
        **config.identity(),
        "data_digest": key.data_digest,
        "num_conversations": [len(part.answer_start) for part in parts],
        "target_digest": key.target_digest,
        "layers": list(key.layers),
        "start_from": _identity_of(starting, revises_vocab=revises_vocab),
    }
    del target  # frees its decoder layers, which are no longer needed
    workplace = Workplace(
        out=out,
        identity=identity,
        head_config=written_config,
        vocabulary=vocabulary,
        source=source,
        train=train,
        held_out=held_out,
    )
    return Trainer(config, workplace, head, objective, progress)


def _begin(
    head: TrainableHead, starting: StartingHead | None, target: FrozenTarget, vocabulary: DraftVocabulary, *, seed: int
) -> str:
    """Sets the head's first weights. Returns text that says where they come from."""
    token_ids = torch.from_numpy(vocabulary.token_ids)
    if starting is None:
        return "from the target's last layer" if initialize(head, target, token_ids, seed=seed) else "from scratch"
    output_rows = starting.output_rows(vocabulary, target.output_rows(token_ids))
    try:
        head.load_state_dict({**starting.weights, OUTPUT_LAYER: output_rows})
    except RuntimeError as error:
        raise ConfigError(f"start_from: {error}") from error
    return "from the head to start from"


def _identity_of(starting: StartingHead | None, *, revises_vocab: bool) -> str | None:
    if starting is None:
        return None
    return f"{starting.digest}, vocabulary revised" if revises_vocab else starting.digest


def _features(
    directory: Path, key: FeaturesKey, conversations: Conversations, target: FrozenTarget, progress: ConsoleProgress
) -> Features:
    if not is_complete(directory, key):
        compute_features(directory, key, conversations, target, progress)
    return open_features(directory, key)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda is not available here")
    return torch.device(name)


def _make_writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out: {out}: {error.strerror}") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise ConfigError(f"out: {out} is not writable")


def _require_chains(conversations: Conversations, held_out: Ints, num_steps: int) -> None:
    first = np.maximum(0, conversations.answer_start[held_out] - 2)
    if not (conversations.lengths[held_out] - 1 - num_steps > first).any():
        raise ConfigError(f"num_held_out: no held-out answer has {num_steps + 1} tokens, which an evaluation needs")
