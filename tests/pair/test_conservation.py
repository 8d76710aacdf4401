"""Tests that the check at the end of every engine test fails if either side lost a row or a slot (field rule A6,
invariant I9).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.kv.pool import KvPool, RowLease
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from tests.support.pair import InProcessPair, pairs_that_keep_all

Leak = Callable[[KvPool, RowLease], None]
SAMPLING = ResolvedSampling(seed=1, max_tokens=4)


def lose_a_slot(pool: KvPool, lease: RowLease) -> None:
    """Releases the lease except for its last slot."""
    KvPool.release(pool, lease)
    pool._columns.num_slots[lease.row] -= 1


def lose_the_row(pool: KvPool, lease: RowLease) -> None:
    """Releases the lease's slots, but not its row."""
    del pool._held[lease.row]
    pool._slots.give_back(lease.slots)


def give_a_slot_back_twice(pool: KvPool, lease: RowLease) -> None:
    KvPool.release(pool, lease)
    pool._columns.slots[lease.row, lease.num_tokens] = lease.slots[0]
    pool._columns.num_slots[lease.row] += 1


def pool_of(pair: InProcessPair, side: str) -> KvPool:
    return pair.decode.pool if side == "decode" else pair.prefill.pool


def plant(pair: InProcessPair, side: str, leak: Leak, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the next release on that side leak. Later releases are sound."""
    pool = pool_of(pair, side)

    def release(lease: RowLease) -> None:
        monkeypatch.delattr(pool, "release")
        leak(pool, lease)

    monkeypatch.setattr(pool, "release", release, raising=False)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("leak", [lose_a_slot, lose_the_row, give_a_slot_back_twice])
def test_a_planted_leak_fails_the_test_that_ran_the_pair(
    leak: Leak, side: str, last_token_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match=r"slots are lost or held twice|rows: "), pairs_that_keep_all() as make:
        pair = make(last_token_target)
        pair.submit("request", [5, 6, 7], SAMPLING)
        plant(pair, side, leak, monkeypatch)
        pair.run()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_row_that_nobody_releases_is_noticed(
    side: str, last_token_target: TargetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pairs_that_keep_all() as make:
        pair = make(last_token_target)
        outcome = pair.submit("request", [5, 6, 7], SAMPLING)
        held: list[RowLease] = []
        plant(pair, side, lambda pool, lease: held.append(lease), monkeypatch)
        pair.run()
        assert outcome.finished is not None, "the client notices nothing"
        with pytest.raises(AssertionError, match="not over"):
            pair.settle(bound_s=0.2)
        pool_of(pair, side).release(held[0])


def test_a_pair_that_keeps_all_passes(last_token_target: TargetModel) -> None:
    with pairs_that_keep_all() as make:
        pair = make(last_token_target)
        pair.submit("request", [5, 6, 7], SAMPLING)
        pair.run()
