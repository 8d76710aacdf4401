"""The handoff over gRPC, to any number of prefill replicas: those at fixed addresses, and those found by names, which
come and go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from common.addresses import Name, is_name, numeric_form, parse_name
from common.errors import BatonError, EngineFault, FingerprintMismatch, PrefillUnavailable
from common.rpc.grpc_options import MAX_MESSAGE_BYTES, channel_options
from common.rpc.name_lookup import LookedUpName, LookUp, look_up
from common.telemetry.timeline import HANDOFF, Timeline
from common.wire.codec_frames import FrameCodec
from common.wire.fingerprint import Fingerprint
from decode_service.handoff.grpc_call import GrpcCall
from decode_service.handoff.grpc_replica import OPEN_ACCESS, GrpcReplica, PrefillAccess
from decode_service.handoff.receive_budget import ReceiveBudget
from decode_service.handoff.transport import HandoffTimeouts, Post
from decode_service.messages import (
    BreakCall,
    CallEnded,
    CancelHandoffRows,
    Replica,
    ReplicasChanged,
    SegmentsLanded,
    StartHandoff,
)

_log = structlog.get_logger(__name__)


class GrpcTransport:
    """A HandoffTransport over gRPC. It is created on the event loop on which it runs.

    `addresses` are "HOST:PORT", one replica each, "dns:///NAME:PORT", a replica for each address that `look_up`
    finds, or "file:///PATH", a replica for each address in the file. With TLS the certificates of replicas found by a
    DNS name must be for NAME, and the others for the replica's own host. While the receive budget is full, a
    handoff call reads one more frame and holds it; then gRPC's flow control stops the replica.
    """

    def __init__(
        self,
        *,
        post: Post,
        addresses: Sequence[str],
        fingerprint: Fingerprint,
        vocab_size: int,
        receive_budget_bytes: int,
        timeouts: HandoffTimeouts,
        access: PrefillAccess = OPEN_ACCESS,
        look_up: LookUp = look_up,
        num_channels_per_replica: int = 2,
        timeline: Timeline | None = None,
    ) -> None:
        self._track = (timeline or Timeline()).track(HANDOFF)
        self._post = post
        self._fingerprint = fingerprint
        self._codec = FrameCodec(fingerprint=fingerprint, vocab_size=vocab_size)
        self._timeouts = timeouts
        self._metadata = access.metadata
        self._budget = ReceiveBudget(receive_budget_bytes)
        self._loop = asyncio.get_running_loop()

        def connect(address: str, certified_host: str | None) -> GrpcReplica:
            return GrpcReplica(
                address=address,
                fingerprint=fingerprint,
                access=access,
                options=channel_options(max_receive_bytes=MAX_MESSAGE_BYTES, server_name=certified_host),
                num_channels=num_channels_per_replica,
                timeouts=timeouts,
            )

        self._replicas = GrpcReplicas(
            addresses=addresses,
            connect=connect,
            look_up=look_up,
            has_calls=lambda address: any(call.replica == address for call in self._calls.values()),
            post=post,
            timeouts=timeouts,
        )
        self._calls: dict[str, GrpcCall] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._break_errors: dict[str, BatonError] = {}
        self._is_open = False

    async def open(self) -> None:
        self._is_open = True
        self._replicas.open()

    def start(self, command: StartHandoff) -> None:
        self._loop.call_soon_threadsafe(self._start, command)

    def cancel_rows(self, command: CancelHandoffRows) -> None:
        self._loop.call_soon_threadsafe(self._cancel_rows, command)

    def break_call(self, command: BreakCall) -> None:
        error = EngineFault(f"the call was broken: {command.reason}")
        self._loop.call_soon_threadsafe(self._break, command.call_id, error)

    def landed(self, command: SegmentsLanded) -> None:
        self._loop.call_soon_threadsafe(self._landed, command)

    async def close(self) -> None:
        self._is_open = False
        for call_id in list(self._tasks):
            self._break(call_id, PrefillUnavailable("the handoff is closed"))
        if tasks := tuple(self._tasks.values()):
            await asyncio.wait(tasks, timeout=self._timeouts.close_timeout_s)
        await self._replicas.close()

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _start(self, command: StartHandoff) -> None:
        closed = PrefillUnavailable("the handoff is closed")
        replica = self._replicas.get(command.replica) if self._is_open else closed
        if isinstance(replica, BatonError):
            self._post(CallEnded(command.call_id, replica))
            return
        call = GrpcCall(
            command=command,
            replica=replica,
            fingerprint=self._fingerprint,
            codec=self._codec,
            budget=self._budget,
            post=self._post,
            timeouts=self._timeouts,
            metadata=self._metadata,
            track=self._track,
        )
        task = self._loop.create_task(call.exchange())
        self._calls[command.call_id] = call
        self._tasks[command.call_id] = task
        # Not in the task's own code: a task cancelled before its first step never runs any.
        task.add_done_callback(partial(self._ended, command))

    def _cancel_rows(self, command: CancelHandoffRows) -> None:
        if (call := self._calls.get(command.call_id)) is not None:
            call.cancel_rows(command.rows)

    def _landed(self, command: SegmentsLanded) -> None:
        self._budget.give_back(command.num_bytes)
        if command.shared and (call := self._calls.get(command.call_id)) is not None:
            call.release_segments(command.shared)

    def _break(self, call_id: str, error: BatonError) -> None:
        if (task := self._tasks.get(call_id)) is not None:
            self._break_errors.setdefault(call_id, error)
            task.cancel()

    def _ended(self, command: StartHandoff, task: asyncio.Task[None]) -> None:
        del self._calls[command.call_id], self._tasks[command.call_id]
        broken = self._break_errors.pop(command.call_id, None)
        error = broken or _error_of(task)
        if broken is None and isinstance(error, PrefillUnavailable | FingerprintMismatch):
            # The engine must learn of the loss before it chooses another replica; the next poll corrects wrong reports.
            # A fingerprint mismatch also counts as a loss for now: only the poll can make it permanent.
            lost = error if isinstance(error, PrefillUnavailable) else PrefillUnavailable(str(error))
            self._replicas.lost(command.replica, lost)
        self._post(CallEnded(command.call_id, error))


def _error_of(task: asyncio.Task[None]) -> BatonError | None:
    if task.cancelled():
        return PrefillUnavailable("the call was cancelled")
    error = task.exception()
    if error is None or isinstance(error, BatonError):
        return error
    _log.error("a handoff call failed", exc_info=error)
    return EngineFault(f"a handoff call failed: {error!r}")


class _NameWatch(LookedUpName):
    """Keeps the addresses behind one name up to date. `on_look_up` is called after each look-up."""

    def __init__(
        self,
        *,
        name: Name,
        look_up: LookUp,
        interval_s: float,
        timeout_s: float,
        on_look_up: Callable[[], None],
    ) -> None:
        super().__init__(name=name, look_up=look_up, timeout_s=timeout_s)
        self._watch_interval_s = interval_s
        self._on_look_up = on_look_up
        self._is_failing = False

    async def watch(self) -> None:
        """Looks the name up repeatedly until the task is cancelled."""
        while True:
            await self.refresh()
            self._log_changes()
            self._on_look_up()
            await asyncio.sleep(self._watch_interval_s)

    def _log_changes(self) -> None:
        if self.error and not self._is_failing:
            _log.warning("looking up %s failed, what was found stays: %s", self.name, self.error)
        elif self._is_failing and not self.error:
            _log.info("looking up %s succeeds again", self.name)
        self._is_failing = bool(self.error)


Connect = Callable[[str, str | None], GrpcReplica]
"""Connects to the replica at an address. The second argument is the host that the replica's certificate must name, or
None for the address's own host.
"""


@dataclass(slots=True)
class _Watched:
    replica: GrpcReplica
    name: Name | None
    seen: Replica
    look_now: asyncio.Event = field(default_factory=asyncio.Event)
    looker: asyncio.Task[None] | None = None


class GrpcReplicas:
    """Polls every known replica and calls `post` with all their states when one changes. For the event loop only.

    `addresses` has fixed addresses, and names that lead to several (`common.addresses.Name`). An address found in
    several ways is one replica. A replica that its name no longer lists is kept while it is ready, or while `has_calls`
    returns True for its address. A name without any addresses yet is reported as a replica that is not ready, with the
    name as its address.
    """

    def __init__(
        self,
        *,
        addresses: Sequence[str],
        connect: Connect,
        look_up: LookUp,
        has_calls: Callable[[str], bool],
        post: Callable[[ReplicasChanged], None],
        timeouts: HandoffTimeouts,
    ) -> None:
        self._connect = connect
        self._has_calls = has_calls
        self._post = post
        self._timeouts = timeouts
        self._fixed = tuple(address for address in addresses if not is_name(address))
        self._names = tuple(
            _NameWatch(
                name=parse_name(address),
                look_up=look_up,
                interval_s=timeouts.look_up_interval_s,
                timeout_s=timeouts.look_up_timeout_s,
                on_look_up=self._update,
            )
            for address in addresses
            if is_name(address)
        )
        self._watched: dict[str, _Watched] = {}
        self._posted: list[tuple[Replica, str]] | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        self._update()
        self._watchers = [asyncio.create_task(name.watch()) for name in self._names]

    def get(self, address: str) -> GrpcReplica | BatonError:
        """Returns the replica, or the error that says why no call can be opened to it now. Raises nothing."""
        if (watched := self._watched.get(address)) is None:
            return PrefillUnavailable(f"{address}: is not a replica")
        return watched.seen.error or watched.replica

    def lost(self, address: str, error: PrefillUnavailable) -> None:
        """Marks a replica as not ready, because a call to it was lost with `error`, and polls it at once.

        An unknown address is ignored.
        """
        if (watched := self._watched.get(address)) is not None:
            self._saw(watched, Replica(address, is_ready=False, error=error))
            watched.look_now.set()

    async def close(self) -> None:
        """Stops polling and closes every connection, within a bounded time."""
        self._is_open = False
        for address in list(self._watched):
            self._let_go(address)
        for watcher in self._watchers:
            watcher.cancel()
        if tasks := (*self._watchers, *self._closing):
            await asyncio.wait(tasks, timeout=self._timeouts.close_timeout_s)

    def _update(self) -> None:
        """Connects to new replicas. Drops those that their name no longer lists, if they are not ready and have no
        call. Then posts the states if they changed.
        """
        if not self._is_open:
            return
        wanted = self._wanted()
        for address, watched in list(self._watched.items()):
            is_gone = address not in wanted or wanted[address] != watched.name
            if is_gone and not watched.seen.is_ready and not self._has_calls(address):
                self._let_go(address)
        for address, name in wanted.items():
            if address not in self._watched:
                self._watch(address, name)
        self._report()

    def _wanted(self) -> dict[str, Name | None]:
        """Returns every address to poll, each once, with the name it was found by (None for a fixed one)."""
        wanted: dict[str, Name | None] = dict.fromkeys(self._fixed)
        known = set(map(numeric_form, self._fixed))
        for watch in self._names:
            for address in watch.found:
                if address not in known:
                    known.add(address)
                    wanted[address] = watch.name
        return wanted

    def _watch(self, address: str, name: Name | None) -> None:
        if name is not None:
            _log.info("prefill replica %s: found behind %s", address, name)
        not_looked = Replica(address, is_ready=False, error=PrefillUnavailable("not looked at yet"))
        watched = _Watched(self._connect(address, name.certified_host if name else None), name, not_looked)
        self._watched[address] = watched
        watched.looker = asyncio.create_task(self._keep_looking(watched))

    def _let_go(self, address: str) -> None:
        watched = self._watched.pop(address)
        if self._is_open:
            _log.info("prefill replica %s: no longer behind %s, let go", address, watched.name)
        closing = asyncio.create_task(_close(watched))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _keep_looking(self, watched: _Watched) -> None:
        while True:
            watched.look_now.clear()
            self._saw(watched, await watched.replica.look(self._timeouts.poll_timeout_s))
            # Not wait_for: on Python 3.11 it loses a cancellation that coincides with its time-out.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.poll_interval_s):
                    await watched.look_now.wait()

    def _saw(self, watched: _Watched, replica: Replica) -> None:
        if replica.is_ready != watched.seen.is_ready:
            _log.info("prefill replica %s: %s", replica.address, "ready" if replica.is_ready else replica.error)
        watched.seen = replica
        self._update()

    def _report(self) -> None:
        """Posts the replicas' states if they changed. Errors with the same text count as equal."""
        replicas = [watched.seen for watched in self._watched.values()]
        replicas += [
            Replica(str(watch.name), is_ready=False, error=PrefillUnavailable(watch.error))
            for watch in self._names
            if not watch.found
        ]
        texts = [(replace(each, error=None), repr(each.error)) for each in replicas]
        if texts != self._posted:
            self._posted = texts
            self._post(ReplicasChanged(tuple(replicas), others_may_come=bool(self._names)))


async def _close(watched: _Watched) -> None:
    if watched.looker is not None:
        watched.looker.cancel()
        await asyncio.wait({watched.looker})
    await watched.replica.close()
