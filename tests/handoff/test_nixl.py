"""KV read through NIXL, by real processes over TCP, where a peer must do its part: what is read, what is given up, what
a process that dies costs, and that gRPC takes over where it must. The contract suite runs the way that NIXL chooses.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from baton.v1 import prefill_pb2
from common.errors import EngineFault, PrefillUnavailable, StartupError
from common.kv.shared_kv import MAX_LENT_BYTES, PoolTicket, RemoteKv
from common.kv.shared_pool import PoolUnusable
from common.nixl.child import NixlError, TransferProcess
from common.wire.codec_checks import ProtocolError
from decode_service.handoff.grpc_replica import GrpcReplica
from decode_service.handoff.nixl_pool import NixlPool
from decode_service.messages import BreakCall, StartHandoff
from prefill_service.lent_memory import KvTransport, LentMemory
from prefill_service.messages import OpenCall
from tests.e2e.running import wait_until
from tests.handoff.homes import FAST, LentSegments, NixlHome, NixlPeers
from tests.handoff.samples import FINGERPRINT, ROOMY_BUDGET_BYTES, TARGET, failed, prebuilt, row, segment
from tests.handoff.scripted_prefill import BOUND_S, RecordingDecode, ScriptedPrefill
from tests.wire.strategies import comparable

GROUPS = (TARGET,)


class Pair(NixlHome):
    def __init__(self, peers: NixlPeers, retry_s: float = 600.0) -> None:
        self.timeouts = replace(FAST, nixl_retry_s=retry_s)
        self.prefill, self.decode = ScriptedPrefill(), RecordingDecode()
        super().__init__(self.prefill, self.decode, FINGERPRINT, ROOMY_BUDGET_BYTES, peers)

    def start(self, call_id: str = "call") -> OpenCall:
        num_opened = len(self._opened())
        self.transport.start(StartHandoff(call_id, self.address, (row(),)))
        return self.prefill.opened(num_opened + 1)[-1]

    def hand_over(self, call_id: str) -> bool:
        """Whether a whole call came through NIXL: not one that is refused, lost or to be served over gRPC."""
        num_opened = len(self._opened())
        self.transport.start(StartHandoff(call_id, self.address, (row(),)))
        wait_until(lambda: len(self._opened()) > num_opened or self.decode.num_ends(call_id) == 1)
        if len(self._opened()) == num_opened:
            return False
        call = self._opened()[-1]
        if call.shares_memory:
            self.emit(call, prebuilt(0))
        else:
            self.prefill.emit(call.call_id, failed(0))
        self.prefill.finish(call.call_id)
        if self.decode.ended(call_id).error is not None or not call.shares_memory:
            return False
        arrived, _ = self.decode.frames(call_id, 2)
        assert comparable(arrived) == comparable(segment(0, 3))
        return True

    def emit(self, call: OpenCall, *others: object) -> None:
        """One segment, and what follows it."""
        self.prefill.emit(call.call_id, segment(0, 3), *others)  # type: ignore[arg-type]

    def _opened(self) -> list[OpenCall]:
        return [command for command in self.prefill.commands.all() if isinstance(command, OpenCall)]

    @property
    def reader(self) -> NixlPool:
        replica = self.transport._replicas.get(self.address)  # type: ignore[attr-defined]
        assert isinstance(replica, GrpcReplica) and isinstance(replica._pool, NixlPool)
        return replica._pool


@contextmanager
def stopped(process: TransferProcess) -> Iterator[None]:
    """Reads of its memory are under way until it goes on."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)


def is_reading(pool: NixlPool) -> bool:
    return pool._turn.locked()


@contextmanager
def peers_over_tcp() -> Iterator[NixlPeers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        peers = NixlPeers(GROUPS)
        yield peers
        peers.close()


@pytest.fixture(scope="module")
def peers() -> Iterator[NixlPeers]:
    """For tests in which no process ends while it reads: over TCP that may end the lender's, too."""
    with peers_over_tcp() as peers:
        yield peers


@pytest.fixture
def own_peers() -> Iterator[NixlPeers]:
    with peers_over_tcp() as peers:
        yield peers


@pytest.fixture(scope="module")
def opened(peers: NixlPeers) -> Iterator[NixlPool]:
    """For tests that do not lose it."""
    pool = peers.loop.run(open_pool(peers))
    yield pool
    peers.loop.run(pool.close())


@pytest.fixture
def make_pair() -> Iterator[Callable[..., Pair]]:
    pairs: list[Pair] = []

    def make(peers: NixlPeers, **options: float) -> Pair:
        pairs.append(Pair(peers, **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


async def open_pool(peers: NixlPeers) -> NixlPool:
    offer = peers.lender.offer
    assert offer is not None
    return await NixlPool.opened(offer, groups=GROUPS, timeout_s=BOUND_S)


def remote(pool: NixlPool, lent: LentSegments, slots: tuple[int, ...]) -> RemoteKv:
    """Two layers."""
    shared = lent.pool.lend("target", slice(1, 3), slots, lent.pool.stamp(slots))
    remote = pool.read("target", slice(1, 3), shared.ticket)
    assert remote is not None
    return remote


# ---- reads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [(5, 6, 7), (9, 3, 4, 64, 1)], ids=["in a row", "scattered"])
def test_what_is_read_is_the_writers_kv_in_the_order_of_its_tokens(
    peers: NixlPeers, opened: NixlPool, slots: tuple[int, ...]
) -> None:
    kv = peers.lent.pool.groups["target"]
    kv[:, :, :100] = np.random.default_rng(0).integers(0, 256, kv[:, :, :100].shape, np.uint8)
    assert (opened.secret, opened.num_slots) == (peers.lent.pool.secret, peers.lent.pool.num_slots)
    shared = peers.loop.run(opened.fetch(remote(opened, peers.lent, slots)))
    assert shared.layers.tobytes() == kv[1:3, :, list(slots)].tobytes()
    assert shared.is_current


def test_what_another_row_has_by_now_is_not_current(peers: NixlPeers, opened: NixlPool) -> None:
    stale = remote(opened, peers.lent, (5, 6, 7))
    peers.lent.pool.stamp((7,))
    assert not peers.loop.run(opened.fetch(stale)).is_current


def test_slots_that_are_not_the_pools_and_more_than_a_segment_may_lend_are_not_read(
    peers: NixlPeers, opened: NixlPool
) -> None:
    for slots in ((0,), (opened.num_slots + 1,), (1, 2**32 - 1)):
        assert opened.read("target", slice(0, 1), PoolTicket(slots, 1, 1)) is None
    huge = replace(remote(opened, peers.lent, (1,)), shape=(1, 2, 1, MAX_LENT_BYTES))
    with pytest.raises(ProtocolError, match=r"kv_segment\.ticket"):
        peers.loop.run(opened.fetch(huge))


def test_what_was_read_stays_as_it_is_while_it_is_held(peers: NixlPeers, opened: NixlPool) -> None:
    kv, staging = peers.lent.pool.groups["target"], opened._staging
    wait_until(lambda: not staging._held)
    kv[1:3, :, 1] = 1
    first = peers.loop.run(opened.fetch(remote(opened, peers.lent, (1,))))
    kv[1:3, :, 1] = 2
    second = peers.loop.run(opened.fetch(remote(opened, peers.lent, (1,))))
    layers = first.layers
    del first
    assert set(layers.ravel()) == {1} and set(second.layers.ravel()) == {2}
    assert len(staging._held) == 2
    del layers, second
    wait_until(lambda: not staging._held)


async def test_what_is_no_agents_metadata_makes_the_pool_unusable(peers: NixlPeers) -> None:
    offer = prefill_pb2.NixlPool(agent_metadata=b"not an agent")
    with pytest.raises(PoolUnusable, match="NIXL"):
        await NixlPool.opened(offer, groups=GROUPS, timeout_s=BOUND_S)


def test_a_read_that_passes_its_bound_ends_the_process_and_writes_nothing_any_more(
    own_peers: NixlPeers,
) -> None:
    peers, lender = own_peers, own_peers.lender_now()

    async def give_up() -> None:
        pool = await open_pool(peers)
        _header = await pool._staging.take(8)
        pool._process._timeout_s = 0.2
        kv = remote(pool, peers.lent, (1, 2))
        with stopped(lender):
            reading = asyncio.ensure_future(pool.fetch(kv))
            for _ in range(4):  # until it is asked
                await asyncio.sleep(0)
            start = max(pool._staging._held)
            with pytest.raises(NixlError, match=r"did not answer within 0\.2 s"):
                await reading
            assert pool.is_lost and pool.has_ended, "before its memory may be anybody else's"
        await asyncio.sleep(0)
        assert not any(pool._staging._memory[start : start + kv.num_bytes])
        with pytest.raises(NixlError, match="let go of"):
            await pool.fetch(kv)
        await pool.close()

    peers.loop.run(give_up())


def test_a_pool_that_is_retired_is_read_until_no_call_uses_it(peers: NixlPeers) -> None:
    async def retire() -> None:
        pool = await open_pool(peers)
        with pool.in_use():
            pool.retire()
            assert (await pool.fetch(remote(pool, peers.lent, (1, 2)))).is_current
        assert pool.is_lost
        await pool._process._process.wait()

    peers.loop.run(retire())


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
        peers.loop.run(pair._server.set_ready(False))
        pair.decode.latest_replica(lambda replica: not replica.is_ready)
        assert pair.decode.num_ends("call") == 0
    assert pair.decode.ended("call").error is None
    arrived, _ = pair.decode.frames("call", 2)
    assert comparable(arrived) == comparable(segment(0, 3))
    peers.loop.run(pair._server.set_ready(True))
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


@pytest.mark.parametrize("side", ["reader", "lender"])
def test_a_process_killed_in_mid_read_costs_the_call_an_attempt_and_is_started_anew(
    own_peers: NixlPeers, make_pair: Callable[..., Pair], side: str, caplog: pytest.LogCaptureFixture
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
    wait_until(lambda: "its KV comes over gRPC for 0.0 s: NIXL" in caplog.text)
    call_ids = (f"try {number}" for number in count())
    wait_until(lambda: pair.hand_over(next(call_ids)))


def test_a_way_that_fails_again_and_again_is_tried_less_and_less_often(
    peers: NixlPeers, make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_pair(peers, retry_s=0.001)

    async def not_there(*_: object, **__: object) -> NixlPool:
        raise PoolUnusable("no way to it")

    pair.reader.is_lost = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NixlPool, "opened", not_there)
        wait_until(lambda: "gRPC for 0.008 s: NIXL" in caplog.text)
        assert not pair.start().shares_memory
    waits = re.findall(r"comes over gRPC for (\S+) s: NIXL", caplog.text)
    assert waits[:4] == ["0.001", "0.002", "0.004", "0.008"]


# ---- where it is not there -----------------------------------------------------------------------------------------


@pytest.fixture(params=["raise ImportError('no such file')", "import os; os.abort()"], ids=["missing", "aborting"])
def bad_library(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What every process for NIXL loads; and what is said of it."""
    (tmp_path / "nixl_cu12").mkdir()
    (tmp_path / "nixl_cu12" / "__init__.py").write_text(request.param)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    is_missing = request.param.startswith("raise")
    return r"NIXL is not installed \(pip" if is_missing else rf"its process ended \(status -{signal.SIGABRT:d}\)"


async def test_a_service_that_is_to_offer_it_and_cannot_does_not_start(bad_library: str) -> None:
    with pytest.raises(StartupError, match=f"kv_transport: NIXL: {bad_library}"):
        await LentMemory.opened("nixl", groups=GROUPS, num_slots=64, is_on_host=True)


def test_a_receiver_without_it_gets_kv_over_grpc_and_says_so_once(
    peers: NixlPeers, bad_library: str, make_pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pair = make_pair(peers, retry_s=0.0)
    assert not pair.start().shares_memory
    assert not pair.start("next").shares_memory
    assert sum("its KV comes over gRPC: NIXL: " in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("transport", "is_on_host", "has_name"),
    [("grpc", True, None), ("shared_memory", True, True), ("shared_memory", False, None), ("nixl", False, None)],
)
async def test_the_setting_decides_who_can_read_the_pool_which_is_nobody_on_a_gpu(
    transport: KvTransport, is_on_host: bool, has_name: bool | None
) -> None:
    with capture_logs() as logs:
        lent = await LentMemory.opened(transport, groups=GROUPS, num_slots=64, is_on_host=is_on_host)
    assert (None if lent.pool is None else bool(lent.pool.name)) == has_name
    assert lent.nixl_offer() is None
    assert [line["event"] for line in logs] == ([] if is_on_host else ["kv_over_grpc"])
    await lent.close()
