"""Tests of how a client waits for a change of a role: until the service is ready, for a bounded time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from baton.errors import BatonError, Cancelled, DeadlineExceeded, FailedPrecondition, Unavailable
from baton.roles import Role, RoleClient, RoleState

BEFORE = RoleState(
    role=Role.PREFILL,
    changing_to=Role.DECODE,
    instance_id="a",
    is_ready=True,
    roles=(Role.PREFILL, Role.DECODE),
    num_orders=1,
    last_failure="",
    grace_period_s=5.0,
)
AFTER = dataclasses.replace(BEFORE, role=Role.DECODE, changing_to=None, instance_id="b")


class ScriptedClient(RoleClient):
    """A RoleClient whose service gives `answers`, and the last one for ever. Its time passes only while it sleeps."""

    def __init__(self, *answers: RoleState | BatonError) -> None:
        self.now_s = 0.0
        super().__init__("127.0.0.1:1", clock=lambda: self.now_s, sleep=self._pass)
        self._answers = list(answers)

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds

    def order(self, role: Role) -> RoleState:
        return BEFORE

    def state(self) -> RoleState:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, BatonError):
            raise answer
        return answer


@pytest.fixture
def scripted() -> Callable[..., ScriptedClient]:
    return ScriptedClient


def test_it_waits_through_the_drain_and_the_time_in_which_nothing_answers(
    scripted: Callable[..., ScriptedClient],
) -> None:
    not_ready = dataclasses.replace(AFTER, is_ready=False)
    with scripted(BEFORE, Cancelled("it stops"), Unavailable("refused"), not_ready, AFTER) as client:
        change = client.change(Role.DECODE)
    assert (change.before, change.after) == (Role.PREFILL, AFTER)
    assert change.seconds == pytest.approx(0.4)


def test_a_change_that_failed_is_an_error_with_its_reason(scripted: Callable[..., ScriptedClient]) -> None:
    back = dataclasses.replace(BEFORE, changing_to=None, last_failure="max_kv_tokens: too few")
    with (
        scripted(Unavailable("refused"), back) as client,
        pytest.raises(FailedPrecondition, match="is a prefill service again: max_kv_tokens: too few"),
    ):
        client.change(Role.DECODE)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (BEFORE, "is still changing"),
        (Unavailable("127.0.0.1:1: nothing listens"), "nothing listens"),
        (dataclasses.replace(AFTER, is_ready=False), "is a decode service, and not ready"),
    ],
)
def test_it_waits_as_long_as_the_grace_period_and_a_start_take(
    scripted: Callable[..., ScriptedClient], answer: RoleState | BatonError, why: str
) -> None:
    with scripted(answer) as client, pytest.raises(DeadlineExceeded, match=why):
        client.change(Role.DECODE, start_timeout_s=20.0)
    assert client.now_s == pytest.approx(25.0, abs=0.2)
