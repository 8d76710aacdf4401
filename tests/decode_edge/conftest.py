from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from decode_service.messages import Abort
from tests.decode_edge.edge_under_test import Edge, running_edge


@pytest.fixture
def log() -> Iterator[list[Any]]:
    with capture_logs() as lines:
        yield lines


@pytest.fixture
async def edge() -> AsyncIterator[Edge]:
    """A running edge. At the end of the test no request may be left, and no request may have been aborted twice."""
    with capture_logs() as log:
        async with running_edge(log) as running:
            yield running
            running.router.on_death(RuntimeError("the test is over"))
            await running.live_requests.wait_idle()
        aborted = [command.request_id for command in running.engine.of_type(Abort)]
        assert len(aborted) == len(set(aborted)), "a request was aborted twice"
