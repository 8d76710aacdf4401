"""A pair whose KV goes through NIXL. Its processes are real, and connected over TCP, where the peer must take part in
each read.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest

from common.nixl.child import TransferProcess
from decode_service.handoff.grpc_replica import GrpcReplica
from decode_service.handoff.nixl_pool import NixlPool
from decode_service.messages import StartHandoff
from prefill_service.messages import OpenCall
from tests.handoff.homes import FAST, NixlHome, NixlPeers
from tests.handoff.samples import FINGERPRINT, ROOMY_BUDGET_BYTES, TARGET, failed, prebuilt, row, segment
from tests.handoff.scripted_prefill import BOUND_S, RecordingDecode, ScriptedPrefill
from tests.support.running_pair import wait_until
from tests.wire.strategies import comparable

GROUPS = (TARGET,)


class Pair(NixlHome):
    def __init__(self, peers: NixlPeers, retry_s: float = 600.0) -> None:
        self.timeouts = replace(FAST, pool_retry_s=retry_s)
        self.prefill, self.decode = ScriptedPrefill(), RecordingDecode()
        super().__init__(self.prefill, self.decode, FINGERPRINT, ROOMY_BUDGET_BYTES, peers)

    def start(self, call_id: str = "call") -> OpenCall:
        num_opened = len(self._opened())
        self.transport.start(StartHandoff(call_id, self.address, (row(),)))
        return self.prefill.opened(num_opened + 1)[-1]

    def hand_over(self, call_id: str) -> bool:
        """Runs a call, and returns whether its KV came through NIXL. It is False if the call was refused, lost or sent
        over gRPC.
        """
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
        """Emits one segment of the call, followed by `others`."""
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
    """Stops a process within this block, so that reads of its memory stay under way until it continues."""
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


async def open_pool(peers: NixlPeers) -> NixlPool:
    offer = peers.lender.offer
    assert offer.agent_metadata
    return await NixlPool.opened(offer, groups=GROUPS, timeout_s=BOUND_S)
