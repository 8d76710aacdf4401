"""Tests of how a client waits for a change of a role, until the service is ready, for a bounded time; and of the tokens
that it shows a service with others in each role.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest
import typer

from baton import planner
from baton.cli.services import plan
from baton.errors import BatonError, Cancelled, DeadlineExceeded, FailedPrecondition, Unauthenticated, Unavailable
from baton.planner import advise, sample_loads
from baton.roles import RoleClient, RoleState
from baton.v1 import prefill_pb2, prefill_pb2_grpc, roles_pb2, roles_pb2_grpc
from common.role import Role
from tests.support.free_ports import free_ports
from tests.support.services_here import BOUND_S

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


@pytest.fixture(autouse=True)
def patient_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "CALL_TIMEOUT_S", BOUND_S)


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


# ---- tokens ---------------------------------------------------------------------------------------------------------


class FakeService(roles_pb2_grpc.RolesServicer, prefill_pb2_grpc.PrefillServicer):
    """A service that changes its role at once, and takes another token in each, and `for_roles` for its role alone. Its
    prefill engine is blocked: it has a prompt in the queue, and computes none.
    """

    def __init__(self, tokens: dict[Role, str], for_roles: str = "") -> None:
        self._tokens = tokens
        self._for_roles = for_roles
        self.role = Role.PREFILL

    def _state(self, context: Any, *others: str) -> Any:
        shown = dict(context.invocation_metadata()).get("authorization")
        if shown not in [f"Bearer {each}" for each in (self._tokens[self.role], *others)]:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "authorization: the token is not known here")
        number = roles_pb2.ROLE_PREFILL if self.role is Role.PREFILL else roles_pb2.ROLE_DECODE
        return roles_pb2.RoleState(role=number, is_ready=True, roles=[1, 2])

    def GetRole(self, request: roles_pb2.GetRoleRequest, context: Any) -> roles_pb2.GetRoleResponse:
        return roles_pb2.GetRoleResponse(state=self._state(context, self._for_roles))

    def SetRole(self, request: roles_pb2.SetRoleRequest, context: Any) -> roles_pb2.SetRoleResponse:
        state = self._state(context, self._for_roles)
        state.changing_to = request.role
        self.role = Role.DECODE if request.role == roles_pb2.ROLE_DECODE else Role.PREFILL
        return roles_pb2.SetRoleResponse(state=state)

    def GetLoad(self, request: Any, context: Any) -> prefill_pb2.GetPrefillLoadResponse:
        self._state(context)
        return prefill_pb2.GetPrefillLoadResponse(num_queued=1, num_uncomputed_tokens=9, num_computed_tokens=5)


@contextmanager
def fake_service(*, for_roles: str = "", **tokens: str) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    fake = FakeService({Role(role): each for role, each in tokens.items()}, for_roles)
    roles_pb2_grpc.add_RolesServicer_to_server(fake, server)
    prefill_pb2_grpc.add_PrefillServicer_to_server(fake, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def test_the_other_token_is_shown_where_the_first_is_refused() -> None:
    with fake_service(prefill="for-handoffs", decode="for-clients") as address:
        with RoleClient(address, token="for-handoffs", other_token="for-clients") as client:
            assert client.change(Role.DECODE).after.role is Role.DECODE
            assert client.change(Role.PREFILL).after.role is Role.PREFILL
        with RoleClient(address, token="for-handoffs") as client, pytest.raises(Unauthenticated):
            client.change(Role.DECODE)


def test_a_planner_has_a_token_for_each_kind_and_a_blocked_prefill_service_does_not_compute() -> None:
    with fake_service(prefill="for-handoffs", decode="for-clients") as address:
        one = sample_loads([address], window_s=0.0, interval_s=1.0, token="for-clients")
        both = sample_loads([address], window_s=0.0, interval_s=1.0, token="for-clients", other_token="for-handoffs")
    assert not one.prefill and "the token is not known" in one.missing[0]
    (sample,) = both.prefill[address]
    assert not both.missing and sample.num_uncomputed_tokens == 9 and not sample.is_computing


def test_a_service_that_is_named_in_two_ways_counts_once() -> None:
    with fake_service(prefill="a-token", decode="a-token") as address:
        also = address.replace("127.0.0.1", "localhost")
        seen = sample_loads([address, also], window_s=0.0, interval_s=1.0, token="a-token")
    assert (list(seen.prefill), seen.missing) == ([address], [])


def test_a_planner_whose_first_token_is_for_roles_alone_shows_the_other_one_for_the_load() -> None:
    with fake_service(for_roles="for-roles", prefill="for-handoffs", decode="for-clients") as address:
        seen = sample_loads([address], window_s=0.0, interval_s=1.0, token="for-roles", other_token="for-handoffs")
    assert not seen.missing and len(seen.prefill[address]) == 1


def test_no_number_is_wanted_where_a_service_missed_the_last_look_alone() -> None:
    tokens, now_s = {"prefill": "a-token", "decode": "a-token"}, 0.0
    with ExitStack() as leaves, fake_service(**tokens) as stays:
        address = leaves.enter_context(fake_service(**tokens))

        def sleep(seconds: float) -> None:
            nonlocal now_s
            now_s += seconds
            leaves.close()

        seen = sample_loads(
            [stays, address], window_s=1.0, interval_s=1.0, token="a-token", clock=lambda: now_s, sleep=sleep
        )
    advice = advise(seen.prefill, seen.decode, missing=seen.missing)
    assert f"1 of 2 answers of {address}: " in advice.missing[0] and advice.holds
    assert (advice.prefill.now, advice.prefill.wanted, advice.decode.wanted) == (1, None, None)


def test_the_command_prints_no_wanted_number_while_advice_is_held(capsys: pytest.CaptureFixture[str]) -> None:
    (nobody,) = free_ports(1)
    with pytest.raises(typer.Exit) as ended:
        plan([f"127.0.0.1:{nobody}"], window_s=0.4, interval_s=0.05)
    assert ended.value.exit_code == 1
    printed = capsys.readouterr().out
    assert "prefill: 0 now; busy" in printed and "no change is advised now: not every service answered" in printed
    assert "wanted" not in printed
