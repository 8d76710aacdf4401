"""Fixtures: processes for NIXL, pairs that use them, and logged events."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from structlog.testing import capture_logs

from common.kv import shared_pool
from tests.handoff.homes import NixlPeers
from tests.handoff.nixl_pair import Pair, peers_over_tcp
from tests.handoff.scripted_prefill import BOUND_S


@pytest.fixture(autouse=True)
def pools_may_answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pool, "ANSWER_TIMEOUT_S", BOUND_S)


@pytest.fixture(scope="module")
def peers() -> Iterator[NixlPeers]:
    """NIXL peers for tests in which no process ends during a read. Over TCP, the end of one peer could also end the
    other's process.
    """
    with peers_over_tcp() as peers:
        yield peers


@pytest.fixture
def logged() -> Iterator[Callable[[], str]]:
    """A function that returns the events which our code has logged since the test began, one per line."""
    with capture_logs() as lines:
        yield lambda: "\n".join(line["event"] for line in lines)


@pytest.fixture
def own_peers() -> Iterator[NixlPeers]:
    with peers_over_tcp() as peers:
        yield peers


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(peers: NixlPeers, **options: float) -> Pair:
        pairs.append(Pair(peers, **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()
