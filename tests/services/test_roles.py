"""Tests of changing a process's role: what may be ordered, what happens if a role cannot begin, and what stays."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import socket
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import psutil
import pytest
from prometheus_client import CollectorRegistry, Gauge

from baton import planner
from baton.cli.services import plan, role
from baton.client import AsyncClient, PrefillClient
from baton.errors import FailedPrecondition, Unauthenticated
from baton.planner import sample_loads
from baton.roles import RoleClient, RoleState
from baton.server_info import HealthStatus
from baton.service_process import READY_SERVICE
from baton.v1 import roles_pb2, roles_pb2_grpc
from common.config.settings import DecodeSettings, PrefillSettings, ServiceSettings
from common.errors import Draining, EngineLost, PrefillUnavailable, RoleRefused, StartupError
from common.kv.pool import KvPool
from common.role import Role
from common.service.process import Process, RolePart, Serve, serve_roles
from common.service.roles import RoleSwitch
from common.service.runtime import Runtime, open_runtime
from common.telemetry.metrics import RoleMetrics
from decode_service import main as decode_main
from decode_service.edge.processes import edges as edges_module
from decode_service.handoff.grpc_call import error_of_status
from prefill_service import main as prefill_main
from tests.support.free_ports import free_address
from tests.support.running_pair import wait_until
from tests.support.services_here import BOUND_S, pair_here, until

PREFILL, DECODE = PrefillSettings(), DecodeSettings()

# ---- orders ---------------------------------------------------------------------------------------------------------


def test_an_order_makes_the_service_leave_and_another_order_for_the_same_role_does_nothing() -> None:
    switch = RoleSwitch([Role.PREFILL, Role.DECODE])
    switch.order(Role.PREFILL)
    assert not switch.leaves.is_set() and switch.num_orders == 0

    switch.order(Role.DECODE)
    switch.order(Role.DECODE)

    assert switch.leaves.is_set() and switch.changing_to is Role.DECODE and switch.num_orders == 1


def test_a_change_that_is_in_progress_cannot_be_turned_round() -> None:
    switch = RoleSwitch([Role.PREFILL, Role.DECODE])
    switch.order(Role.DECODE)
    with pytest.raises(RoleRefused, match="changing to decode"):
        switch.order(Role.PREFILL)


def test_a_role_without_settings_is_refused_and_the_setting_is_named() -> None:
    switch = RoleSwitch([Role.PREFILL])
    with pytest.raises(RoleRefused, match=r"^other_role: is not set") as refused:
        switch.order(Role.DECODE)
    assert refused.value.metadata == {"field": "other_role"} and not switch.leaves.is_set()


def test_a_process_that_ends_takes_no_orders() -> None:
    switch = RoleSwitch([Role.PREFILL, Role.DECODE])
    switch.end()
    with pytest.raises(Draining):
        switch.order(Role.DECODE)


# ---- one role after another -----------------------------------------------------------------------------------------


class FakeEngine:
    """What a role's metrics refer to. It refers to itself, as the parts of a service refer to each other."""

    def __init__(self) -> None:
        self.itself = self


class Fakes:
    """Parts whose services only note what happens, in `steps`. `fails` has the errors with which services begin.

    `engines` are those of the roles so far, and `num_engines_left` how many of them were left when the last one began.
    A service that leaves waits for `has_drained`.
    """

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.fails: list[Exception | None] = []
        self.instance_ids: list[str] = []
        self.engines: list[weakref.ref[FakeEngine]] = []
        self.num_engines_left = 0
        self.has_drained = asyncio.Event()
        self.has_drained.set()
        self.registry = CollectorRegistry()
        self.metrics = RoleMetrics(self.registry)
        self.switch: RoleSwitch | None = None
        self.leave = lambda: self.steps.append("leaves")
        runtime = SimpleNamespace(leave_role=lambda: self.leave())  # noqa: PLW0108 - tests set another
        runtime.in_role = lambda settings: runtime
        self.runtime = cast(Runtime, runtime)

    def serve(self, role: Role) -> Serve[Any]:
        async def serve(_settings: ServiceSettings, process: Process) -> None:
            self.switch = process.switch
            self.num_engines_left = sum(each() is not None for each in self.engines)
            engine = FakeEngine()
            self.engines.append(weakref.ref(engine))
            load = Gauge("baton_queued_requests", "The same name in both roles.", registry=process.registry)
            load.set_function(lambda: 1.0 if engine.itself else 0.0)
            if self.fails and (error := self.fails.pop(0)) is not None:
                raise error
            process.on_serving()
            self.steps.append(role)
            self.instance_ids.append(process.instance_id)
            await process.switch.leaves.wait()
            await self.has_drained.wait()

        return serve

    async def run(self) -> None:
        parts = {each.role: RolePart(each, self.serve(each.role)) for each in (PREFILL, DECODE)}
        async with asyncio.timeout(BOUND_S):
            await serve_roles(parts, self.runtime, self.metrics, instance_id="first")

    async def serves(self, num_times: int) -> RoleSwitch:
        """Waits until a service has begun to serve for the `num_times`-th time."""
        await until(lambda: len(self.instance_ids) >= num_times)
        assert self.switch is not None
        return self.switch

    def sample(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


async def test_a_role_follows_the_other_and_has_metrics_and_an_id_of_its_own(fakes: Fakes) -> None:
    running = asyncio.create_task(fakes.run())
    (await fakes.serves(1)).order(Role.DECODE)
    (await fakes.serves(2)).order(Role.PREFILL)
    switch = await fakes.serves(3)

    assert fakes.steps == ["prefill", "leaves", "decode", "leaves", "prefill"]
    assert fakes.instance_ids[0] == "first" and len(set(fakes.instance_ids)) == 3
    assert fakes.num_engines_left == 0  # when the last role began
    assert switch.role is Role.PREFILL and switch.changing_to is None and switch.num_orders == 2
    assert fakes.sample("baton_role", role="prefill") == 1 and fakes.sample("baton_role", role="decode") == 0
    assert fakes.sample("baton_role_changes_total", outcome="changed") == 2
    assert fakes.sample("baton_queued_requests") == 1

    os.kill(os.getpid(), signal.SIGTERM)
    await running


async def test_the_loop_goes_on_while_a_role_is_left_and_metrics_say_not_ready(fakes: Fakes) -> None:
    begins, may_end = threading.Event(), threading.Event()

    def leave() -> None:
        begins.set()
        fakes.steps.append("in time" if may_end.wait(BOUND_S) else "too late")

    fakes.leave = leave
    running = asyncio.create_task(fakes.run())
    (await fakes.serves(1)).end()
    await until(begins.is_set)
    may_end.set()
    await running
    assert fakes.steps == ["prefill", "in time"] and fakes.sample("baton_ready") == 0


async def test_metrics_let_go_of_a_role_that_cannot_be_left(fakes: Fakes) -> None:
    def leave() -> None:
        raise RuntimeError("stuck")

    fakes.leave = leave
    running = asyncio.create_task(fakes.run())
    switch = await fakes.serves(1)
    assert fakes.sample("baton_queued_requests") == 1
    switch.end()
    with pytest.raises(RuntimeError, match="stuck"):
        await running
    assert fakes.sample("baton_queued_requests") is None


async def test_a_role_that_cannot_begin_gives_way_to_the_one_before(fakes: Fakes) -> None:
    fakes.fails = [None, StartupError("max_kv_tokens: too few")]
    running = asyncio.create_task(fakes.run())
    (await fakes.serves(1)).order(Role.DECODE)
    switch = await fakes.serves(2)

    assert fakes.steps == ["prefill", "leaves", "leaves", "prefill"]
    assert switch.changing_to is None and switch.last_failure == "max_kv_tokens: too few"
    assert fakes.sample("baton_role_changes_total", outcome="failed") == 1

    switch.order(Role.DECODE)  # what failed once may be tried again
    assert (await fakes.serves(3)).role is Role.DECODE and switch.last_failure == ""
    switch.end()
    await running


async def test_if_the_role_before_cannot_begin_again_the_process_ends_with_its_error(fakes: Fakes) -> None:
    fakes.fails = [None, StartupError("no"), StartupError("listen: nor that")]
    running = asyncio.create_task(fakes.run())
    (await fakes.serves(1)).order(Role.DECODE)
    with pytest.raises(StartupError, match=r"^listen: nor that$"):
        await running


async def test_sigterm_during_a_change_ends_the_process_without_another_role(fakes: Fakes) -> None:
    running = asyncio.create_task(fakes.run())
    switch = await fakes.serves(1)
    fakes.has_drained.clear()
    switch.order(Role.DECODE)
    os.kill(os.getpid(), signal.SIGTERM)
    await until(lambda: switch.is_ending)
    fakes.has_drained.set()
    await running
    assert fakes.steps == ["prefill", "leaves"] and switch.is_ending


async def test_a_lost_engine_ends_the_process_also_while_its_role_changes(fakes: Fakes) -> None:
    fakes.fails = [None, EngineLost("dead")]
    running = asyncio.create_task(fakes.run())
    (await fakes.serves(1)).order(Role.DECODE)
    with pytest.raises(EngineLost):
        await running


# ---- real services --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def both_here(
    model: Path, *, prefill: str = "", decode: Mapping[str, Any] | None = None, **more: Any
) -> AsyncIterator[str]:
    """Runs a process that can have both roles, and yields its address. As a decode service it hands over to `prefill`,
    or computes prompts itself. Settings in `more` are those of both roles, those in `decode` of the one.
    """
    address = free_address()
    shared: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "num_threads": 1,
        "max_kv_tokens": 4096,
        "debug_checks": True,
        "listen": address,
        **more,
    }
    settings = (
        PrefillSettings(**shared),
        DecodeSettings(
            prefill=(prefill or "127.0.0.1:1", address),
            local_prefill_tokens=0 if prefill else None,
            prefill_fallback=not prefill,
            **shared | dict(decode or {}),
        ),
    )
    runtime = open_runtime(*settings)
    parts = {
        Role.PREFILL: RolePart(settings[0], prefill_main.serve),
        Role.DECODE: RolePart(settings[1], decode_main.serve),
    }
    serving = asyncio.create_task(serve_roles(parts, runtime, RoleMetrics(CollectorRegistry()), instance_id="first"))
    try:
        await settles(address, Role.PREFILL, serving)
        yield address
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(BOUND_S):
            await serving
        runtime.close()


async def settles(address: str, role: Role, serving: asyncio.Task[None]) -> None:
    """Waits until the process is ready in `role`."""

    def is_settled(state: RoleState) -> bool:
        return state.role is role and state.is_ready and state.changing_to is None

    with RoleClient(address) as client:
        async with asyncio.timeout(BOUND_S):
            while True:
                try:
                    if is_settled(await asyncio.to_thread(client.state)):
                        return
                except Exception:
                    assert not serving.done(), serving.exception()
                    await asyncio.sleep(0.01)


def engine_threads() -> Counter[str]:
    """Returns the names of the engines' threads of this process, other tests' too."""
    return Counter(each.name for each in threading.enumerate() if each.name.endswith("-engine"))


def pools() -> int:
    """Returns how many KV pools there are in this process, other tests' too."""
    gc.collect()
    return sum(type(each) is KvPool for each in gc.get_objects())  # isinstance would ask dead weak references


async def test_a_role_is_switched_back_and_forth_under_load_and_no_request_notices(
    tiny_model_dir: Callable[[str], Path],
) -> None:
    prompts = [[10 + number, 20, 30 + number] for number in range(4)]
    model, num_before = tiny_model_dir("llama"), pools()
    async with (
        pair_here(model) as pair,
        both_here(model, prefill=pair.prefill.address) as both,
    ):
        options: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "seed": 3, "ignore_eos": True}
        alone = [await pair.decode.client.complete(token_ids=prompt, **options) for prompt in prompts]
        done = asyncio.Event()

        async def ask(client: AsyncClient, number: int) -> int:
            num_served = 0
            while not done.is_set():
                served = await client.complete(token_ids=prompts[number], **options)
                assert served.token_ids == alone[number].token_ids
                num_served += 1
            return num_served

        async with AsyncClient(f"{pair.decode.address},{both}", resume=True) as client:
            asking = [asyncio.create_task(ask(client, number)) for number in range(len(prompts))]
            with RoleClient(both) as roles:
                for wanted in (Role.DECODE, Role.PREFILL, Role.DECODE, Role.PREFILL):
                    change = await asyncio.to_thread(roles.change, wanted)
                    assert change.after.role is wanted and change.seconds > 0
                again = await asyncio.to_thread(roles.change, Role.PREFILL)
                assert again.seconds == 0 and again.after.num_orders == 4
            done.set()
            assert all(await asyncio.gather(*asking))
        assert pools() <= num_before + 3


async def test_a_role_that_cannot_listen_leaves_nothing_behind_and_the_role_before_serves(
    tiny_model_dir: Callable[[str], Path],
) -> None:
    num_before, engines_before = pools(), engine_threads()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        async with both_here(tiny_model_dir("llama"), decode={"listen": address}) as both:
            with RoleClient(both) as roles:
                for _ in range(5):
                    with pytest.raises(FailedPrecondition, match="listen: cannot listen"):
                        await asyncio.to_thread(roles.change, Role.DECODE)
                state = await asyncio.to_thread(roles.state)
            assert pools() <= num_before + 1 and engine_threads() - engines_before == Counter(["prefill-engine"])
            assert state.role is Role.PREFILL and state.num_orders == 5


async def test_a_handoff_to_a_process_that_is_a_decode_service_by_now_is_tried_elsewhere(
    tiny_model_dir: Callable[[str], Path],
) -> None:
    async with pair_here(tiny_model_dir("llama")) as pair, grpc.aio.insecure_channel(pair.decode.address) as channel:
        call = channel.stream_stream("/baton.v1.Prefill/Handoff")()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()  # nothing is written: a write after the refusal would end the call as INTERNAL
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert isinstance(error_of_status("replica", refused.value), PrefillUnavailable)


async def test_the_roles_service_refuses_what_it_does_not_know_and_asks_for_the_token(
    tiny_model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a-secret-of-these-tests\n")
    tokens.chmod(0o600)
    for_roles = tmp_path / "role-tokens"
    for_roles.write_text("only-for-operators\n")
    for_roles.chmod(0o600)
    async with pair_here(
        tiny_model_dir("llama"),
        prefill={"auth_token_file": tokens, "role_token_file": for_roles},
        decode={"prefill_token_file": tokens, "role_token_file": for_roles},
    ) as pair:

        def ask() -> None:
            with RoleClient(pair.prefill.address) as stranger, pytest.raises(Unauthenticated):
                stranger.order(Role.DECODE)
            with RoleClient(pair.prefill.address, token="a-secret-of-these-tests") as a_client:
                assert a_client.state().roles == (Role.PREFILL,)
                with pytest.raises(Unauthenticated):
                    a_client.order(Role.DECODE)
            with (
                PrefillClient(pair.prefill.address, token="only-for-operators") as operator,
                pytest.raises(Unauthenticated),
            ):
                operator.load()
            with RoleClient(pair.prefill.address, token="only-for-operators") as client:
                assert client.state().roles == (Role.PREFILL,)
                with pytest.raises(FailedPrecondition, match="other_role: is not set") as refused:
                    client.change(Role.DECODE)
                assert refused.value.field == "other_role" and refused.value.reason == "ROLE_REFUSED"
            with grpc.insecure_channel(pair.decode.address) as channel:
                stub: Any = roles_pb2_grpc.RolesStub(channel)
                assert stub.GetRole(roles_pb2.GetRoleRequest()).state.role == roles_pb2.ROLE_DECODE
                with pytest.raises(grpc.RpcError, match="no bearer token was shown"):
                    stub.SetRole(roles_pb2.SetRoleRequest())
                with pytest.raises(grpc.RpcError, match="role: 0 is neither"):
                    stub.SetRole(roles_pb2.SetRoleRequest(), metadata=[("authorization", "Bearer only-for-operators")])

        await asyncio.to_thread(ask)


async def test_the_commands_tell_roles_and_what_the_load_wants(
    tiny_model_dir: Callable[[str], Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "CALL_TIMEOUT_S", BOUND_S)
    nobody, now_s = free_address(), 0.0
    async with pair_here(tiny_model_dir("llama")) as pair:
        prefill, decode = pair.prefill.address, pair.decode.address
        await pair.decode.client.complete(token_ids=[10, 20, 30], max_tokens=2)
        await asyncio.to_thread(role, prefill, None, as_json=True)
        await asyncio.to_thread(role, decode, None)
        await asyncio.to_thread(plan, [prefill, decode, nobody], window_s=1.0, interval_s=0.1, as_json=True)
        loop = asyncio.get_running_loop()

        def stop_decode(seconds: float) -> None:
            nonlocal now_s
            now_s += seconds

            async def stop() -> None:
                pair.decode.terminated.set()
                await pair.decode.serving

            asyncio.run_coroutine_threadsafe(stop(), loop).result(BOUND_S)

        load = await asyncio.to_thread(
            sample_loads,
            [prefill, decode],
            window_s=0.2,
            interval_s=0.15,
            clock=lambda: now_s,
            sleep=stop_decode,
        )
    printed = capfd.readouterr().out
    first, last = (json.loads(line) for line in printed.splitlines() if line.startswith('{"event": '))
    assert (first["event"], first["state"]["role"], first["state"]["roles"]) == ("role", "prefill", ["prefill"])
    assert f"{decode}: a decode service, ready; stays one: its setting other_role is not set" in printed
    advice = last["advice"]
    assert [(advice[kind]["now"], advice[kind]["wanted"]) for kind in ("prefill", "decode")] == [(1, None), (1, None)]
    assert advice["holds"] == "not every service answered all the time" and nobody in advice["missing"][0]
    assert load.prefill[prefill][0].num_computed_tokens == 3 and load.prefill[prefill][0].is_settled
    assert not load.decode and f"answers of {decode}: " in load.missing[0]


# ---- what stays -----------------------------------------------------------------------------------------------------


def shared_files_of(pid: int) -> int:
    """Returns how many files of shared tensors a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "memfd:baton" in line})


@pytest.mark.thorough
async def test_ranks_stay_and_let_go_of_the_pool_of_the_role_before(tiny_model_dir: Callable[[str], Path]) -> None:
    seen = []
    async with both_here(tiny_model_dir("llama"), tensor_parallel=2) as address:
        (rank,) = [each for each in psutil.Process().children() if "common.ranks.follower" in each.cmdline()]
        with RoleClient(address) as roles:
            for _ in range(2):
                await asyncio.to_thread(roles.change, Role.DECODE)
                async with AsyncClient(address) as client:
                    served = await client.complete(token_ids=[10, 20, 30], max_tokens=8, temperature=0.0)
                seen.append((served.token_ids, rank.pid, shared_files_of(rank.pid)))
                await asyncio.to_thread(roles.change, Role.PREFILL)
    assert rank.pid == seen[0][1] and seen[0] == seen[1]


def edges() -> list[psutil.Process]:
    """Returns the processes of edges that serve this one."""
    return [each for each in psutil.Process().children() if "decode_service.edge.processes.process" in each.cmdline()]


@pytest.mark.thorough
async def test_edges_in_processes_begin_and_end_with_the_role(
    tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They serve the model as one process does, and take the order that ends them."""
    monkeypatch.setattr(edges_module, "START_TIMEOUT_S", 10 * BOUND_S)
    model, request = tiny_model_dir("llama"), {"token_ids": [10, 20, 30], "max_tokens": 8, "temperature": 0.0}
    async with pair_here(model) as pair:
        expected = await pair.decode.client.complete(**request)
    async with both_here(model, decode={"edge_processes": 2}) as address:
        with RoleClient(address) as roles:
            for _ in range(2):
                await asyncio.to_thread(roles.change, Role.DECODE)
                assert len(edges()) == 2
                async with AsyncExitStack() as stack:
                    clients = [await stack.enter_async_context(AsyncClient(address)) for _ in range(8)]
                    served = await asyncio.gather(*(client.complete(**request) for client in clients))
                    health = [await client.health(READY_SERVICE["decode"]) for client in clients]
                assert {each.token_ids for each in served} == {expected.token_ids}
                assert {*health} == {HealthStatus.SERVING}
                await asyncio.to_thread(roles.change, Role.PREFILL)
                assert not edges()


def test_forwards_are_fused_once_for_the_largest_of_both_roles(
    tiny_model_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    def new_fusing(*_: object, max_tokens: int, **__: object) -> Callable[[object], None]:
        return lambda _check: begun.append(max_tokens)

    monkeypatch.setattr("common.service.runtime.new_fusing", new_fusing)
    model = str(tiny_model_dir("llama"))
    decode = DecodeSettings(model=model, dtype="float32", num_threads=1)
    prefill = PrefillSettings(model=model, dtype="float32", num_threads=1, max_batch_tokens=700)
    runtime = open_runtime(decode, prefill)
    for turn in (runtime, runtime.in_role(prefill), runtime.in_role(decode)):
        populated: list[str] = []
        turn.start_beside(lambda _check, populated=populated: populated.append("once"))
        turn.beside._thread.join(BOUND_S)  # type: ignore[union-attr]
        turn.leave_role()
        turn.device.close(5.0)
        assert populated == ["once"]
    wait_until(lambda: begun == [700])  # on a thread of its own, which `close` would keep from beginning
    runtime.close()
    assert begun == [700]


def test_the_model_stays_and_the_device_is_new(tiny_model_dir: Callable[[str], Path]) -> None:
    settings = DecodeSettings(model=str(tiny_model_dir("llama")), dtype="float32", num_threads=1)
    runtime = open_runtime(settings)
    stream = weakref.ref(runtime.device)
    later = runtime.in_role(settings)
    assert later.model is runtime.model and later.device is not stream()
    for each in (runtime, later):
        each.device.close(5.0)
