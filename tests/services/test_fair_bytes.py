from __future__ import annotations

import pytest

from common.rpc.fair_shares import FairBytes, NoRoom

A, B, C = ("a", ""), ("b", ""), ("c", "")


def test_one_client_may_have_half_and_all_together_what_there_is() -> None:
    room = FairBytes(100)
    assert room.take(A, 30) == 30
    assert room.take(A, 20) == 20
    with pytest.raises(NoRoom):
        room.take(A, 1)
    assert room.take(B, 40) == 40
    with pytest.raises(NoRoom):
        room.take(C, 11)
    room.give_back(A, 30)
    assert room.take(C, 11) == 11


def test_one_tenant_may_have_half_of_what_its_client_may_have() -> None:
    room = FairBytes(100)
    assert [room.take(("a", tenant), 25) for tenant in "12"] == [25, 25]
    for tenant in "13":
        with pytest.raises(NoRoom):
            room.take(("a", tenant), 1)
    room.give_back(("a", "1"), 25)
    assert room.take(("a", "3"), 1000) == 25


def test_what_is_larger_than_half_is_let_through_alone() -> None:
    room = FairBytes(100)
    taken = room.take(A, 1000)
    with pytest.raises(NoRoom):
        room.take(A, 1)
    assert room.take(B, 50) == 50
    room.give_back(A, taken)
    assert room.take(A, 50) == 50
