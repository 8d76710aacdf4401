"""What a service does beside serving: in order, ended with the service."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from common.work_beside import Stopped, WorkBeside

BOUND_S = 20.0


def test_works_are_done_in_order() -> None:
    done: list[str] = []
    is_done = threading.Event()
    beside = WorkBeside()
    beside.start(lambda check: done.append("first"), lambda check: done.append("second"), lambda check: is_done.set())
    assert is_done.wait(BOUND_S) and beside.stop(BOUND_S)
    assert done == ["first", "second"]


def test_it_ends_between_two_parts_and_begins_nothing_more() -> None:
    has_begun, seen = threading.Event(), list[BaseException]()

    def for_ever(check: Callable[[], None]) -> None:
        has_begun.set()
        try:
            while True:
                check()
        except Stopped as error:
            seen.append(error)
            raise

    beside = WorkBeside()
    beside.start(for_ever, lambda check: pytest.fail("begun after the end"))
    assert has_begun.wait(BOUND_S) and beside.stop(BOUND_S)
    assert len(seen) == 1


def test_one_that_was_never_started_is_stopped_at_once() -> None:
    """The service's start failed before it served."""
    assert WorkBeside().stop(0.0)


def test_one_that_does_not_end_is_told() -> None:
    may_end, beside = threading.Event(), WorkBeside()

    def wait(check: Callable[[], None]) -> None:
        may_end.wait(BOUND_S)

    beside.start(wait)
    assert not beside.stop(0.01)
    may_end.set()
    assert beside.stop(BOUND_S)
