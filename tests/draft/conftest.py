from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from common.draft.head import DraftHead
from common.model.target import TargetModel
from tests.support.loading import load_draft, load_target
from tests.support.models import save_tiny_model

Load = Callable[[Path], DraftHead]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Uses one thread: with heads this small, a second thread would cost far more time than the computation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of six layers. A head reads the states of its layers 2, 3 and 3 by default (2, n // 2 and n - 3)."""
    return save_tiny_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=6)


@pytest.fixture(scope="session")
def target(target_dir: Path) -> TargetModel:
    return load_target(target_dir, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def load(target: TargetModel) -> Load:
    """A function that loads a head for `target` on the CPU in float32."""
    return lambda directory: load_draft(directory, target=target, device="cpu", dtype="float32")
