"""Tests that the process which hosts NIXL reads exactly the writer's bytes, and nothing after the writer has ended."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import cast

import numpy as np
import pytest

from baton.v1 import prefill_pb2
from common.host.child_process import Child, start_peer
from common.host.link import Link
from common.kv.shared_kv import PoolLost, PoolTicket, RemoteKv
from common.kv.shared_pool import NUMBER_BYTES, SECRET_BYTES, PoolUnusable
from common.nixl import transfer_process
from common.nixl.backoff import Backoff
from common.nixl.child import NixlError, TransferProcess
from decode_service.handoff.nixl_pool import NixlPool, Staging
from tests.handoff.homes import LentSegments, NixlPeers
from tests.handoff.nixl_pair import GROUPS, is_reading, open_pool, stopped
from tests.handoff.scripted_prefill import BOUND_S
from tests.support.running_pair import wait_until


@pytest.fixture(scope="module")
def opened(peers: NixlPeers) -> Iterator[NixlPool]:
    """An open NIXL pool, for tests that do not end its processes."""
    pool = peers.loop.run(open_pool(peers))
    yield pool
    peers.loop.run(pool.close())


def remote(pool: NixlPool, lent: LentSegments, slots: tuple[int, ...]) -> RemoteKv:
    """Returns the remote KV of two layers in these slots. `lent` lends it, and it is to be read through `pool`."""
    shared = lent.pool.lend("target", slice(1, 3), slots)
    remote = pool.read("target", slice(1, 3), shared.ticket)
    assert remote is not None
    return remote


@pytest.mark.parametrize("slots", [(5, 6, 7), (9, 3, 4, 64, 1)], ids=["in a row", "scattered"])
def test_what_is_read_is_the_writers_kv_in_the_order_of_its_tokens(
    peers: NixlPeers, opened: NixlPool, slots: tuple[int, ...]
) -> None:
    kv = peers.lent.pool.groups["target"]
    kv[:, :, :100] = np.random.default_rng(0).integers(0, 256, kv[:, :, :100].shape, np.uint8)
    assert opened.secret == peers.lent.pool.secret
    shared = peers.loop.run(opened.fetch(remote(opened, peers.lent, slots)))
    assert shared.layers.tobytes() == kv[1:3, :, list(slots)].tobytes()
    assert shared.is_current


def test_what_another_row_has_by_now_is_not_current(peers: NixlPeers, opened: NixlPool) -> None:
    stale = remote(opened, peers.lent, (5, 6, 7))
    peers.lent.pool.stamp("target", (7,))
    assert not peers.loop.run(opened.fetch(stale)).is_current


def test_slots_that_are_not_the_pools_are_not_read(peers: NixlPeers, opened: NixlPool) -> None:
    for slots in ((0,), (peers.lent.pool.num_slots + 1,), (1, 2**32 - 1)):
        assert opened.read("target", slice(0, 1), PoolTicket(slots, 1, 1)) is None


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

    peers.lent.pool.groups["target"][:] = 7

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
            with pytest.raises(PoolLost, match=r"did not answer within 0\.2 s"):
                await reading
            assert pool.is_lost and pool.has_ended, "before its memory may be anybody else's"
        await read_anew()  # the lender has done by then what it was asked before
        assert not any(pool._staging._memory[start : start + kv.num_bytes])
        with pytest.raises(PoolLost, match="let go of"):
            await pool.fetch(kv)
        await pool.close()

    async def read_anew() -> None:
        """Reads through a new process, once the lender's process runs again. The end of a reader may have ended that
        process too.
        """
        async with asyncio.timeout(BOUND_S):
            while True:
                with suppress(AssertionError, PoolUnusable, NixlError):
                    pool = await open_pool(peers)
                    shared = await pool.fetch(remote(pool, peers.lent, (1, 2)))
                    assert set(shared.layers.ravel()) == {7}
                    await pool.close()
                    return
                await asyncio.sleep(0)

    peers.loop.run(give_up())


def test_a_read_whose_task_is_cancelled_before_its_turn_is_not_begun(peers: NixlPeers, opened: NixlPool) -> None:
    async def cancel() -> None:
        kv = remote(opened, peers.lent, (1, 2))
        with stopped(peers.lender_now()):
            reading, waiting = (asyncio.ensure_future(opened.fetch(kv)) for _ in range(2))
            for _ in range(4):  # until one is asked
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait({waiting})
        assert (await reading).is_current
        assert not is_reading(opened)

    peers.loop.run(cancel())


def test_a_pool_that_is_retired_is_read_until_no_call_uses_it(peers: NixlPeers) -> None:
    async def retire() -> None:
        pool = await open_pool(peers)
        with pool.in_use():
            pool.retire()
            assert (await pool.fetch(remote(pool, peers.lent, (1, 2)))).is_current
        assert pool.is_lost
        await asyncio.to_thread(pool._process._process.wait, BOUND_S)

    peers.loop.run(retire())


def test_a_pool_whose_process_has_ended_is_lost_before_a_read_finds_it_so(peers: NixlPeers) -> None:
    async def end() -> None:
        pool = await open_pool(peers)
        os.kill(pool._process.pid, signal.SIGKILL)
        await asyncio.to_thread(pool._process._process.wait, BOUND_S)
        assert pool.is_lost

    peers.loop.run(end())


class StuckProcess:
    """A process that is stuck in the kernel, so that no signal ends it."""

    pid = 1 << 30  # no process has this id
    returncode = None

    def kill(self) -> None: ...

    def poll(self) -> None: ...

    def wait(self, timeout_s: float) -> None:
        raise subprocess.TimeoutExpired("stuck", timeout_s)


async def test_a_process_that_does_not_end_when_it_is_killed_is_named_and_its_pool_lost(
    logged: Callable[[], str],
) -> None:
    ours, theirs = socket.socketpair()
    process = TransferProcess(cast(Child, StuckProcess()), await Link.on(ours), timeout_s=0.01, end_timeout_s=0.01)
    header = bytes(SECRET_BYTES) + (64).to_bytes(NUMBER_BYTES, "little")
    pool = NixlPool(address=0, header=header, groups=GROUPS, process=process, staging=Staging(1 << 20))
    kv = pool.read("target", slice(1, 3), PoolTicket((1, 2), 1, 1))
    assert kv is not None
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(PoolLost, match=rf"did not answer within 0\.01 s \(process {1 << 30} does not end\)"):
            await pool.fetch(kv)
        assert pool.is_lost and not pool.has_ended
        with pytest.raises(PoolLost, match="let go of"):
            await pool.fetch(kv)
        await pool.close()
    theirs.close()
    assert f"the process {1 << 30} was killed and has not ended" in logged()


def test_a_library_that_hangs_is_ended_by_an_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nixl_cu12").mkdir()
    (tmp_path / "nixl_cu12" / "__init__.py").write_text("while True: pass")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        arguments = (str(file.fileno()), "0.1")
        process, end = start_peer(transfer_process.__name__, *arguments, pass_fds=(file.fileno(),))
    with end:
        assert process.wait(BOUND_S) == -signal.SIGALRM


def test_waits_double_up_to_a_bound_and_begin_anew_after_what_lasted_longer() -> None:
    now_s = 0.0
    backoff = Backoff(first_s=1.0, max_doublings=2, clock_s=lambda: now_s)
    assert [backoff.next_wait_s() for _ in range(4)] == [1.0, 2.0, 4.0, 4.0]
    backoff.succeeded()
    now_s += 4.0
    assert backoff.next_wait_s() == 4.0
    backoff.succeeded()
    now_s += 4.5
    assert [backoff.next_wait_s() for _ in range(2)] == [1.0, 2.0]
