"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.device.factory import open_device
from common.model.loader import load_target
from common.model.target import TargetModel
from tests.support.models import save_last_token_model, save_tiny_model
from tests.support.pair import InProcessPair, PairOptions

MakePair = Callable[..., InProcessPair]


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny random model, by architecture; made once."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = save_tiny_model(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return make


@pytest.fixture(scope="session")
def last_token_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_last_token_model(tmp_path_factory.mktemp("last-token"))


@pytest.fixture(scope="session")
def tiny_target(tiny_model_dir: Callable[[str], Path]) -> Callable[[str], TargetModel]:
    loaded: dict[str, TargetModel] = {}

    def load(architecture: str) -> TargetModel:
        if architecture not in loaded:
            loaded[architecture] = load_target(tiny_model_dir(architecture), device="cpu", dtype="float32")
        return loaded[architecture]

    return load


@pytest.fixture(scope="session")
def last_token_target(last_token_model_dir: Path) -> TargetModel:
    return load_target(last_token_model_dir, device="cpu", dtype="float32")


@pytest.fixture
def make_pair() -> Iterator[MakePair]:
    """Pairs of engines on CPU threads. At the end of the test every row and slot must be back (A6)."""
    made: list[InProcessPair] = []

    def make(model: TargetModel, options: PairOptions | None = None) -> InProcessPair:
        pair = InProcessPair(
            model,
            prefill_device=open_device("cpu", num_threads=1),
            decode_device=open_device("cpu", num_threads=1),
            options=options,
        )
        made.append(pair)
        return pair

    yield make
    for pair in made:
        try:
            pair.settle()
        finally:
            pair.close()
