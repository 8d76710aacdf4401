from __future__ import annotations

import pytest

from common.rpc.fair_shares import FairBytes, NoRoom


def test_one_client_may_have_half_and_all_together_what_there_is() -> None:
    room = FairBytes(100)
    assert room.take("a", 30) == 30
    assert room.take("a", 20) == 20
    with pytest.raises(NoRoom):
        room.take("a", 1)
    assert room.take("b", 40) == 40
    with pytest.raises(NoRoom):
        room.take("c", 11)
    room.give_back("a", 30)
    assert room.take("c", 11) == 11


def test_what_is_larger_than_half_is_let_through_alone() -> None:
    room = FairBytes(100)
    taken = room.take("a", 1000)
    with pytest.raises(NoRoom):
        room.take("a", 1)
    assert room.take("b", 50) == 50
    room.give_back("a", taken)
    assert room.take("a", 50) == 50
