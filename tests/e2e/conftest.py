"""Every test here ends with a check, by GetLoad, that both services are empty. A module's services are its fixture
`pair`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.local_pair import LocalPair
from tests.support.models import save_tiny_model
from tests.support.running_pair import RunningPair, running_pair, wait_until


@pytest.fixture(scope="session")
def large_kv_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with much KV for its amount of computation: 4 KiB a token."""
    return save_tiny_model(tmp_path_factory.mktemp("large-kv"), "llama", num_hidden_layers=8, num_key_value_heads=4)


@pytest.fixture(scope="session")
def plain_pair(tiny_model_dir: Callable[[str], Path], forked: Callable[..., LocalPair]) -> Iterator[RunningPair]:
    """A pair for tests that neither change nor stop it. KV goes over gRPC, as between hosts."""
    with running_pair(
        tiny_model_dir("llama"),
        kind=forked,
        shared_args=("--max-kv-tokens=8192",),
        prefill_args=("--kv-transport=grpc",),
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def everything_is_free_at_the_end(pair: RunningPair) -> Iterator[None]:
    yield
    wait_until(pair.holds_nothing, about=lambda: (pair.load(), [client.load() for client in pair.prefills]))
