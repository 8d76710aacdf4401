from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.draft.conftest import one_thread, target_dir  # noqa: F401 -- fixtures
from tests.training.cases import save_sampled_data
from training.target import FrozenTarget, load_target


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


@pytest.fixture(scope="module")
def target(target_dir: Path) -> FrozenTarget:  # noqa: F811 -- the fixture
    return load_target(target_dir, device="cpu")
