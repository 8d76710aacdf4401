"""Every test here ends with both services empty, as their GetLoads tell it. A module's pair is its fixture `pair`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.running import RunningPair, wait_until


@pytest.fixture(autouse=True)
def everything_is_free_at_the_end(pair: RunningPair) -> Iterator[None]:
    yield
    wait_until(pair.holds_nothing, about=lambda: (pair.load(), [client.load() for client in pair.prefills]))
