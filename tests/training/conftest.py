from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.models import save_tiny_model
from tests.training.cases import save_sampled_data
from training.target import Target, load_target


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Uses one thread: with heads this small, a second thread would cost far more time than the computation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache directory for digests of weights, for this file's tests alone. It is removed after them, because the
    process goes on to other files.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def sampled_data(tmp_path_factory: pytest.TempPathFactory, last_token_model_dir: Path) -> Path:
    directory = tmp_path_factory.mktemp("data")
    return save_sampled_data(directory / "data.npz", last_token_model_dir, num_conversations=200)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of six layers. A head reads the states of its layers 2, 3 and 3 by default (2, n // 2 and n - 3)."""
    return save_tiny_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    return load_target(target_dir, device="cpu")
