"""Tests of the delay after which a process that ended is restarted, on a scripted clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.errors import ServiceDied
from baton.service_process import (
    FIRST_WAIT_S,
    MAX_FAILED_STARTS,
    MAX_WAIT_S,
    WELL_S,
    ChildProcess,
    Ended,
    Restarts,
    StartedAgain,
)


class ScriptedProcess(ChildProcess):
    """A process that runs nothing. The test sets `died` and `has_room` (whether it may be restarted)."""

    def __init__(self) -> None:
        super().__init__(name="decode-0", address="127.0.0.1:1", arguments=(), log_file=Path("decode-0.log"))
        self.num_starts = 0
        self.died = False
        self.status = 1
        self.has_room = True

    @property
    def pid(self) -> int:
        return self.num_starts

    def start(self) -> None:
        if not self.has_room:
            raise OSError("no room")
        self.num_starts += 1
        self.died = False

    def check(self) -> None:
        if self.died:
            raise ServiceDied(self.name, self.status, "", self.log_file)


class Rig:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.process = ScriptedProcess()
        self.restarts = Restarts(self.process, clock=lambda: self.now_s)

    def look_after(self, seconds: float, *, is_ready: bool = False) -> Ended | StartedAgain | None:
        self.now_s += seconds
        return self.restarts.look(is_ready=is_ready)

    def die(self) -> float:
        """Lets the process die, and returns the delay until its restart."""
        self.process.died = True
        ended = self.look_after(0.0)
        assert isinstance(ended, Ended) and "decode-0 ended with status 1" in str(ended.error)
        return ended.restart_in_s

    def die_and_start(self) -> float:
        wait_s = self.die()
        assert isinstance(self.look_after(wait_s), StartedAgain)
        return wait_s


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_it_is_started_once_the_wait_is_over_and_not_before(rig: Rig) -> None:
    assert rig.look_after(5.0, is_ready=True) is None
    assert rig.die() == FIRST_WAIT_S
    assert rig.look_after(FIRST_WAIT_S / 2) is None
    assert rig.look_after(FIRST_WAIT_S / 2) == StartedAgain(pid=1)
    assert rig.look_after(1000.0) is None
    assert rig.process.num_starts == 1


def test_waits_double_up_to_a_bound(rig: Rig) -> None:
    waits = []
    for _ in range(10):
        waits.append(rig.die_and_start())
        rig.look_after(0.0, is_ready=True)
    assert waits == [min(FIRST_WAIT_S * 2**number, MAX_WAIT_S) for number in range(10)]
    assert waits[-1] == MAX_WAIT_S


def test_waits_are_short_again_once_it_was_ready_for_a_while_without_a_break(rig: Rig) -> None:
    rig.die_and_start()
    assert rig.look_after(1.0, is_ready=True) is None
    assert rig.look_after(WELL_S / 2, is_ready=True) is None
    assert rig.die_and_start() == 2 * FIRST_WAIT_S, "it was not for long enough"
    for is_ready in (True, False, True):
        assert rig.look_after(WELL_S - 1.0, is_ready=is_ready) is None
    assert rig.die_and_start() == 4 * FIRST_WAIT_S, "there was a break"
    rig.look_after(0.0, is_ready=True)
    rig.look_after(WELL_S, is_ready=True)
    assert rig.die_and_start() == FIRST_WAIT_S


def test_what_cannot_start_is_given_up(rig: Rig) -> None:
    for _ in range(MAX_FAILED_STARTS):
        rig.die_and_start()
    rig.process.died = True
    with pytest.raises(ServiceDied):
        rig.look_after(0.0)


def test_a_start_that_becomes_ready_counts_anew(rig: Rig) -> None:
    for _ in range(3):
        for _ in range(MAX_FAILED_STARTS):
            rig.die_and_start()
        rig.look_after(0.0, is_ready=True)


def test_settings_that_cannot_be_followed_end_it_at_its_next_start(rig: Rig) -> None:
    rig.process.status = 2
    rig.process.died = True
    assert isinstance(rig.look_after(0.0), Ended), "it was ready once"
    assert isinstance(rig.look_after(FIRST_WAIT_S), StartedAgain)
    rig.process.died = True
    with pytest.raises(ServiceDied):
        rig.look_after(0.0)


def test_a_start_that_the_system_refuses_is_tried_again_later(rig: Rig) -> None:
    wait_s = rig.die()
    rig.process.has_room = False
    refused = rig.look_after(wait_s)
    assert isinstance(refused, Ended) and str(refused.error) == "decode-0 cannot be started: no room"
    rig.process.has_room = True
    assert rig.look_after(refused.restart_in_s / 2) is None
    assert rig.look_after(refused.restart_in_s / 2) == StartedAgain(pid=1)
