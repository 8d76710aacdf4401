"""Tests of the handoff through NIXL: the cost of a process that dies, and the fallback to gRPC.

The contract tests run with the transport that NIXL chooses; here it is TCP.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.v1 import prefill_pb2
from common.config.settings import KvTransport
from common.errors import EngineFault, PrefillUnavailable, StartupError
from common.kv.shared_pool import PoolUnusable
from decode_service.handoff.nixl_pool import NixlPool
from decode_service.messages import BreakCall
from prefill_service.handoff import lent_memory
from prefill_service.handoff.lent_memory import LentMemory, NixlLender
from tests.handoff.homes import NixlPeers
from tests.handoff.nixl_pair import GROUPS, Pair, is_reading, stopped
from tests.handoff.samples import prebuilt, segment
from tests.support.running_pair import wait_until
from tests.wire.strategies import comparable

# ---- the handoff ---------------------------------------------------------------------------------------------------


def test_a_replica_that_drains_and_is_missed_finishes_the_reads_that_were_begun(
    peers: NixlPeers, make_pair: Callable[..., Pair]
) -> None:
    pair = make_pair(peers)
    call = pair.start()
    with stopped(peers.lender_now()):
        pair.emit(call, prebuilt(0))
        pair.prefill.finish(call.call_id)
        wait_until(lambda: is_reading(pair.reader))
        reader = pair.reader
        peers.loop.run(pair.server.set_ready(False))
        pair.decode.latest_replica(lambda replica: not replica.is_ready)
        assert pair.decode.num_ends("call") == 0
    assert pair.decode.ended("call").error is None
    arrived, _ = pair.decode.frames("call", 2)
    assert comparable(arrived) == comparable(segment(0, 3))
    peers.loop.run(pair.server.set_ready(True))
    pair.decode.latest_replica(lambda replica: replica.is_ready)
    assert pair.reader is reader
    assert pair.hand_over("next")


def test_a_call_that_is_broken_while_it_is_read_leaves_the_next_one_its_own_bytes(
    peers: NixlPeers, make_pair: Callable[..., Pair]
) -> None:
    pair = make_pair(peers)
    call = pair.start()
    with stopped(peers.lender_now()):
        pair.emit(call)
        wait_until(lambda: is_reading(pair.reader))
        (held,) = pair.reader._staging._held
        pair.transport.break_call(BreakCall("call", "the test says so"))
        assert isinstance(pair.decode.ended("call").error, EngineFault)
        assert held in pair.reader._staging._held, "the read may still write there"
    assert pair.hand_over("next")


@pytest.mark.parametrize("side", ["reader", pytest.param("lender", marks=pytest.mark.thorough)])
def test_a_process_killed_in_mid_read_costs_the_call_an_attempt_and_is_started_anew(
    own_peers: NixlPeers, make_pair: Callable[..., Pair], side: str, logged: Callable[[], str]
) -> None:
    peers = own_peers
    pair = make_pair(peers, retry_s=0.0)
    call = pair.start()
    victim = pair.reader._process if side == "reader" else peers.lender_now()
    with stopped(peers.lender_now()):
        pair.emit(call)
        wait_until(lambda: is_reading(pair.reader))
        os.kill(victim.pid, signal.SIGKILL)
        if side == "reader":
            error = pair.decode.ended("call").error
    if side == "lender":
        error = pair.decode.ended("call").error
    assert isinstance(error, PrefillUnavailable) and "NIXL" in str(error)
    pair.prefill.closed(call.call_id)
    wait_until(lambda: "its KV comes over gRPC for 0.0 s: NIXL" in logged())
    call_ids = (f"try {number}" for number in count())
    wait_until(lambda: pair.hand_over(next(call_ids)))


def test_a_look_is_answered_while_the_way_is_opened_which_ends_with_its_instance_and_with_the_service(
    peers: NixlPeers, make_pair: Callable[..., Pair]
) -> None:
    pair = make_pair(peers, retry_s=0.0)
    steps: list[str] = []

    async def hang(*_: object, **__: object) -> NixlPool:
        steps.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("ended")
        raise AssertionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NixlPool, "opened", hang)
        pair.reader._has_failed = True
        wait_until(lambda: steps == ["begun"])
        for is_ready in (False, True):
            peers.loop.run(pair.server.set_ready(is_ready))
            pair.decode.latest_replica(lambda replica, want=is_ready: replica.is_ready == want)  # type: ignore[misc]
        assert not pair.start().shares_memory
        pair.servicer._instance_id = "another"
        wait_until(lambda: sorted(steps) == ["begun", "begun", "ended"])
        pair.decode.latest_replica(lambda replica: "NIXL is being connected" in str(replica.error))
        pair.close_transport()
        assert steps[-1] == "ended" and steps.count("ended") == 2


# ---- without NIXL --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["not there now", "no way to it"])
def test_what_cannot_be_had_at_first_is_asked_for_again(
    peers: NixlPeers, make_pair: Callable[..., Pair], reason: str, logged: Callable[[], str]
) -> None:
    async def not_there(*_: object, **__: object) -> NixlPool:
        raise PoolUnusable("NIXL: no way to it")

    with pytest.MonkeyPatch.context() as patch:
        if reason == "not there now":
            patch.setattr(NixlLender, "offer", prefill_pb2.NixlPool())
        else:
            patch.setattr(NixlPool, "opened", not_there)
        pair = make_pair(peers, retry_s=0.01)
        assert not pair.start("over gRPC").shares_memory
        assert re.search(f"its KV comes over gRPC for 0.01 s: NIXL: .*{reason}", logged())
    call_ids = (f"try {number}" for number in count())
    wait_until(lambda: pair.hand_over(next(call_ids)))


@pytest.fixture(params=["raise ImportError('no such file')", "import os; os.abort()"], ids=["missing", "aborting"])
def bad_library(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A pattern of the error that NIXL's processes report. All of them load a broken library."""
    (tmp_path / "nixl_cu12").mkdir()
    (tmp_path / "nixl_cu12" / "__init__.py").write_text(request.param)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    is_missing = request.param.startswith("raise")
    return r"NIXL is not installed \(pip" if is_missing else rf"its process ended \(status -{signal.SIGABRT:d}\)"


async def test_a_service_that_is_to_offer_it_and_cannot_does_not_start(bad_library: str) -> None:
    with pytest.raises(StartupError, match=f"kv_transport: NIXL: {bad_library}"):
        await LentMemory.opened("nixl", groups=GROUPS, num_slots=64, num_window_slots=0, is_on_host=True)


def test_a_receiver_without_it_gets_kv_over_grpc_and_says_so_and_when_it_tries_again(
    peers: NixlPeers, bad_library: str, make_pair: Callable[..., Pair], logged: Callable[[], str]
) -> None:
    pair = make_pair(peers)
    assert not pair.start().shares_memory
    assert not pair.start("next").shares_memory
    assert logged().count("its KV comes over gRPC for 600.0 s: NIXL: ") == 1


@pytest.mark.parametrize(
    ("transport", "is_on_host", "has_name"),
    [
        ("auto", True, True),
        ("auto", False, None),
        ("grpc", True, None),
        ("shared_memory", True, True),
        ("shared_memory", False, None),
        ("nixl", False, None),
    ],
)
async def test_the_setting_decides_who_can_read_the_pool_which_is_nobody_on_a_gpu(
    transport: KvTransport, is_on_host: bool, has_name: bool | None
) -> None:
    with capture_logs() as logs:
        lent = await LentMemory.opened(
            transport, groups=GROUPS, num_slots=64, num_window_slots=0, is_on_host=is_on_host
        )
    assert (None if lent.pool is None else bool(lent.pool.name)) == has_name
    answer = prefill_pb2.GetFingerprintResponse()
    lent.offer(answer)
    assert (bool(answer.kv_pool), answer.HasField("nixl_pool")) == (bool(has_name), False)
    level = "info" if transport == "auto" else "warning"
    assert [(line["event"], line["log_level"]) for line in logs] == ([] if is_on_host else [("kv_over_grpc", level)])
    await lent.close()


@pytest.mark.parametrize(("transport", "level"), [("auto", "info"), ("shared_memory", "warning")])
async def test_where_there_is_no_shared_memory_kv_goes_over_grpc(
    transport: KvTransport, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lent_memory, "DIRECTORY", tmp_path / "not there")
    with capture_logs() as logs:
        lent = await LentMemory.opened(transport, groups=GROUPS, num_slots=64, num_window_slots=0, is_on_host=True)
    assert lent.pool is None
    ((event, told),) = [(line["event"], line["log_level"]) for line in logs]
    assert (event, told) == ("kv_over_grpc", level)
    await lent.close()
