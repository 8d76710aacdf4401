"""KV read through NIXL, by real agents: what is read, what is given up, and that gRPC takes over where it must.

Agents of one process copy from each other; `over_tcp` leaves them only sockets, where a peer must do its part.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from structlog.testing import capture_logs

from baton.v1 import prefill_pb2
from common.errors import PrefillUnavailable, StartupError
from common.kv.layer_group import LayerGroupSpec
from common.kv.lent_pool import PoolUnusable
from common.kv.shared_kv import PoolTicket, RemoteKv
from common.nixl_agent import NixlAgent, NixlError
from common.wire.handoff import KvSegment
from decode_service.handoff import nixl_pool
from decode_service.handoff.nixl_pool import NixlPool
from decode_service.messages import StartHandoff
from prefill_service.lent_memory import LentMemory
from prefill_service.messages import OpenCall, SegmentsReturned
from prefill_service.nixl_lender import NixlLender
from tests.handoff.homes import NixlHome
from tests.handoff.samples import FINGERPRINT, ROOMY_BUDGET_BYTES, SEGMENT_BYTES, failed, prebuilt, row, segment
from tests.handoff.scripted_prefill import BOUND_S, RecordingDecode, ScriptedPrefill
from tests.wire.strategies import comparable

GROUPS = (
    LayerGroupSpec("target", num_layers=3, num_planes=2, num_heads=2, head_dim=8, dtype="float32"),
    LayerGroupSpec("draft", num_layers=2, num_planes=2, num_heads=1, head_dim=4, dtype="float32"),
)
NUM_SLOTS = 64


class Pair(NixlHome):
    def __init__(self, receive_budget_bytes: int = ROOMY_BUDGET_BYTES) -> None:
        self.prefill, self.decode = ScriptedPrefill(), RecordingDecode()
        super().__init__(self.prefill, self.decode, FINGERPRINT, receive_budget_bytes)

    def start(self, call_id: str = "call") -> OpenCall:
        """The prefill engine's view of the newest of one or two calls."""
        self.transport.start(StartHandoff(call_id, self.address, (row(),)))
        return self.prefill.opened(1 if call_id == "call" else 2)[-1]


class Lender(NixlLender):
    """Serves from the start, until it is paused."""

    def __init__(self) -> None:
        super().__init__(groups=GROUPS, num_slots=NUM_SLOTS)
        self._goes_on = threading.Event()
        self._goes_on.set()
        self.serve(self._goes_on.wait)

    def pause(self) -> None:
        self._goes_on.clear()

    def close(self) -> None:
        self._goes_on.set()
        super().close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def lender() -> Iterator[Lender]:
    lender = Lender()
    for kv in lender.pool.groups.values():
        kv[:] = np.random.default_rng(0).integers(0, 256, kv.shape, np.uint8)
    yield lender
    lender.close()


async def opened(lender: Lender, timeout_s: float = BOUND_S) -> NixlPool:
    return await NixlPool.opened(lender.offer, groups=GROUPS, timeout_s=timeout_s)


def remote(pool: NixlPool, lender: Lender, slots: tuple[int, ...]) -> RemoteKv:
    """Two layers of the target's."""
    lent = lender.pool.lend("target", slice(1, 3), slots, lender.pool.stamp(slots))
    remote = pool.read("target", slice(1, 3), lent.ticket)
    assert remote is not None
    return remote


@pytest.mark.parametrize("slots", [(5, 6, 7), (9, 3, 4, 64, 1)], ids=["in a row", "scattered"])
@pytest.mark.parametrize("way", ["", "tcp"])
async def test_what_is_read_is_the_writers_kv_in_the_order_of_its_tokens(
    way: str, slots: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    if way:
        request.getfixturevalue("over_tcp")
    lender: Lender = request.getfixturevalue("lender")
    pool = await opened(lender)
    assert (pool.secret, pool.num_slots) == (lender.pool.secret, NUM_SLOTS)
    kv = remote(pool, lender, slots)
    expected = lender.pool.groups["target"][1:3, :, list(slots)].tobytes()
    payload = await pool.fetch(kv)
    assert payload is not None and payload.tobytes() == expected
    assert kv.num_bytes == len(expected)
    pool.close()


async def test_what_another_row_has_by_now_is_not_taken(lender: Lender) -> None:
    pool = await opened(lender)
    stale = remote(pool, lender, (5, 6, 7))
    lender.pool.stamp((7,))
    assert await pool.fetch(stale) is None
    assert await pool.fetch(remote(pool, lender, (5, 6, 7))) is not None
    pool.close()


async def test_slots_that_are_not_the_pools_are_not_read(lender: Lender) -> None:
    pool = await opened(lender)
    for slots in ((0,), (NUM_SLOTS + 1,), (1, 2**32 - 1)):
        assert pool.read("target", slice(0, 1), PoolTicket(slots, 1, 1)) is None
    pool.close()


async def test_a_peer_that_does_nothing_costs_the_pool_and_no_more_than_the_bound(
    over_tcp: None, lender: Lender
) -> None:
    pool = await opened(lender, timeout_s=0.3)
    kv = remote(pool, lender, (1, 2))
    lender.pause()
    with pytest.raises(NixlError, match=r"did not end within 0\.3 s"):
        await pool.fetch(kv)
    assert pool.is_lost
    with pytest.raises(NixlError, match="let go of"):
        await pool.fetch(kv)
    pool.close()


def test_what_a_read_that_was_given_up_writes_is_nobodys_memory(over_tcp: None) -> None:
    memory = np.arange(1, 1 << 20, dtype=np.uint64)
    into = np.zeros(memory.nbytes, np.uint8)
    peer, reader = NixlAgent(), NixlAgent()
    peer.register(memory.ctypes.data, memory.nbytes)
    reader.connect(peer.metadata)
    ranges = np.array([[memory.ctypes.data, memory.nbytes]], np.uint64)
    with pytest.raises(NixlError, match="did not end"):
        reader.read(ranges, into, timeout_s=0.05)
    into[:] = 0
    for _ in range(2000):
        peer.progress()
        reader.progress()
    assert into.any(), "the peer went on, and so did the read"
    assert reader._written == [into]
    with pytest.raises(NixlError, match="failed before"):
        reader.read(ranges, into, timeout_s=0.05)
    reader.close()
    assert not reader._written
    peer.close()


@pytest.mark.parametrize("metadata", [b"", b"not an agent"])
async def test_what_is_no_agents_metadata_makes_the_pool_unusable(metadata: bytes) -> None:
    with pytest.raises(PoolUnusable):
        await NixlPool.opened(prefill_pb2.NixlPool(agent_metadata=metadata), groups=GROUPS, timeout_s=BOUND_S)


async def test_memory_that_the_agent_does_not_offer_makes_the_pool_unusable(lender: Lender) -> None:
    offer = prefill_pb2.NixlPool(agent_metadata=lender.offer.agent_metadata, address=lender.offer.address + (1 << 40))
    with pytest.raises(PoolUnusable):
        await NixlPool.opened(offer, groups=GROUPS, timeout_s=BOUND_S)


# ---- the handoff ---------------------------------------------------------------------------------------------------


def test_a_loan_ends_when_it_was_read_before_the_engine_has_landed_it(pair: Pair) -> None:
    call = pair.start().call_id
    pair.prefill.emit(call, segment(0, 3), prebuilt(0))
    pair.prefill.finish(call)
    assert pair.decode.ended("call").error is None
    arrived, _ = pair.decode.frames("call", 2)
    assert isinstance(arrived, KvSegment) and arrived.shared is None
    assert comparable(arrived) == comparable(segment(0, 3))
    pair.prefill.commands.wait_until(lambda commands: SegmentsReturned(call, (1,)) in commands)


def test_a_segment_whose_slots_another_row_has_is_dropped_and_its_budget_and_loan_end() -> None:
    pair = Pair(receive_budget_bytes=SEGMENT_BYTES)
    call = pair.start().call_id
    overtaken = pair.lent.lend(segment(0, 0))
    assert overtaken.shared is not None
    pair.lent.pool.stamp(overtaken.shared.ticket.slots)
    pair.prefill.emit(call, overtaken, segment(0, 1), failed(0))
    pair.prefill.finish(call)
    assert pair.decode.ended("call").error is None
    arrived = [comparable(frame) for frame in pair.decode.frames("call", 2)]
    assert arrived == [comparable(segment(0, 1)), comparable(failed(0))]
    pair.prefill.commands.wait_until(lambda commands: SegmentsReturned(call, (1,)) in commands)
    pair.close()


def test_a_read_that_fails_ends_its_call_and_the_next_ones_kv_comes_over_grpc(
    over_tcp: None, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair()
    call = pair.start().call_id
    pair.lender.close()
    pair.prefill.emit(call, segment(0, 0))
    error = pair.decode.ended("call").error
    assert isinstance(error, PrefillUnavailable) and "NIXL" in str(error)
    pair.prefill.closed(call)
    pair.decode.latest_replica(lambda replica: replica.is_ready)
    assert not pair.start("next").shares_memory
    told = [record for record in caplog.records if "comes over gRPC from now on" in record.message]
    assert [record.levelno for record in told] == [logging.WARNING]
    pair.close()


def test_a_receiver_without_nixl_gets_kv_over_grpc_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def not_installed() -> NixlAgent:
        monkeypatch.setitem(sys.modules, "nixl_cu12", None)
        return NixlAgent()

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(nixl_pool, "NixlAgent", not_installed)
    pair = Pair()
    assert not pair.start().shares_memory
    assert not pair.start("next").shares_memory
    assert sum("comes over gRPC: NIXL is not installed" in record.message for record in caplog.records) == 1
    pair.close()


def test_a_service_that_is_to_offer_it_and_cannot_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu12", None)
    with pytest.raises(StartupError, match="kv_transport: NIXL is not installed"):
        LentMemory("nixl", groups=GROUPS, num_slots=NUM_SLOTS, is_on_host=True)


@pytest.mark.parametrize("transport", ["shared_memory", "nixl"])
def test_a_gpus_kv_goes_over_grpc_which_is_said(transport: str) -> None:
    with capture_logs() as logs:
        lent = LentMemory(transport, groups=GROUPS, num_slots=NUM_SLOTS, is_on_host=False)  # type: ignore[arg-type]
    assert lent.pool is None and lent.nixl_pool is None
    assert [line["event"] for line in logs] == ["kv_over_grpc"]
    lent.close()


@pytest.mark.parametrize("transport", ["grpc", "shared_memory", "nixl"])
def test_the_setting_decides_who_can_read_the_pool(transport: str) -> None:
    lent = LentMemory(transport, groups=GROUPS, num_slots=NUM_SLOTS, is_on_host=True)  # type: ignore[arg-type]
    assert (lent.pool is not None, lent.nixl_pool is not None) == (transport != "grpc", transport == "nixl")
    lent.close()
