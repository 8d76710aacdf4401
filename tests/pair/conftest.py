"""Fixtures with a target and a draft head whose drafts are accepted, rejected, or both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.draft_heads import save_copy_head, save_eagle3_head, save_mtp_head
from tests.support.drafted import Drafted, load_drafted
from tests.support.head_parts import load_head, mtp_names, mtp_prefixes, save_head
from tests.support.models import save_last_token_model


def copying_head(directory: Path, target_dir: Path, **options: Any) -> Drafted:
    return load_drafted(target_dir, save_copy_head(directory, target_dir=target_dir, **options))


@pytest.fixture(scope="session")
def sure_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose choice depends on the last token only. Its first choice has nearly all of the probability, so that
    draft trees grow deep along it.
    """
    return save_last_token_model(tmp_path_factory.mktemp("sure"), logits_std=12.0)


@pytest.fixture(scope="session")
def leaning_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose choice depends mostly on its last token, but on all earlier tokens too. So a head that knows the
    usual choice after each token is often right.
    """
    return save_last_token_model(tmp_path_factory.mktemp("leaning"), context_weight=0.05)


@pytest.fixture(scope="session")
def copying(sure_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """A head that proposes the target's own choices, so that drafts are accepted."""
    return copying_head(tmp_path_factory.mktemp("copy"), sure_model_dir, family="eagle3")


@pytest.fixture(scope="session")
def copying_layers(sure_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """A head like `copying`, with one layer for each of five drafts. Each layer reads the output of the one before
    it.
    """
    return copying_head(tmp_path_factory.mktemp("layers"), sure_model_dir, family="nextn", num_layers=5)


@pytest.fixture(scope="session")
def leaning(leaning_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """A head that proposes the token that usually follows the last one, with a draft vocabulary of 60 of the target's
    ids. Its drafts are partly accepted and partly rejected, and the target's tokens depend on the KV of all positions.
    """
    return copying_head(
        tmp_path_factory.mktemp("leaning-head"), leaning_model_dir, family="eagle3", draft_vocab_size=60
    )


@pytest.fixture(scope="session")
def leaning_windows(tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """A head and a target like `leaning`, whose layers attend in windows."""
    target_dir = save_last_token_model(
        tmp_path_factory.mktemp("windows"), architecture="mistral, windows", context_weight=0.05
    )
    return copying_head(tmp_path_factory.mktemp("windows-head"), target_dir, family="eagle3", draft_vocab_size=60)


@pytest.fixture(scope="session")
def leaning_layers(leaning_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """A head like `leaning`, with all of the target's ids and one layer for each of four drafts. Each layer reads the
    output of the one before it.
    """
    return copying_head(tmp_path_factory.mktemp("leaning-layers"), leaning_model_dir, family="nextn", num_layers=4)


@pytest.fixture(scope="session")
def guessing(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """A random head for a random target. Drafts are accepted only by chance."""
    target_dir = tiny_model_dir("llama")
    return load_drafted(target_dir, save_eagle3_head(tmp_path_factory.mktemp("random"), target_dir=target_dir))


@pytest.fixture(scope="session")
def guessing_layers(tiny_model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """A head of five random layers, each of which reads the target's hidden states."""
    target_dir = tiny_model_dir("llama")
    head_dir = save_mtp_head(tmp_path_factory.mktemp("layers"), target_dir=target_dir, layout="mimo_v2", num_layers=5)
    return load_drafted(target_dir, head_dir)


@pytest.fixture(scope="session")
def erring_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the target's embeddings and other next-token distributions. The erring heads copy it instead of the
    target.
    """
    return save_last_token_model(tmp_path_factory.mktemp("erring"), disturbance=0.6)


@pytest.fixture(scope="session")
def erring(last_token_model_dir: Path, erring_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """A head that proposes what `erring_model_dir` would choose instead of the target, with 56 of the target's 64
    ids.
    """
    directory = tmp_path_factory.mktemp("erring-head")
    head_dir = save_copy_head(directory, target_dir=erring_model_dir, family="eagle3", draft_vocab_size=56)
    return load_drafted(last_token_model_dir, head_dir)


@pytest.fixture(scope="session")
def erring_layers(
    last_token_model_dir: Path, erring_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Drafted:
    """A head that proposes what `erring_model_dir` would choose instead of the target, with one layer for each of four
    drafts.
    """
    directory = tmp_path_factory.mktemp("erring-layers")
    save_copy_head(directory, target_dir=erring_model_dir, family="nextn", num_layers=4)
    config, tensors = load_head(directory)
    output_head = load_file(erring_model_dir / "model.safetensors")["lm_head.weight"]
    for prefix in mtp_prefixes(erring_model_dir, "nextn", 4):
        tensors[f"{prefix}{mtp_names('nextn')['output_head']}.weight"] = output_head.clone()
    return load_drafted(last_token_model_dir, save_head(directory, config, tensors))
