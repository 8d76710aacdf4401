"""Fixtures of the tests that run thousands of lives of an engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def unknown_memory() -> Iterator[None]:
    """Lets no pool ask how much memory there is. Reading the answer from several files of /proc and of control groups
    took a tenth of each life's time.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.host.memory.available_bytes", lambda: None)
        yield
