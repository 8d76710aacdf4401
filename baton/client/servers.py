"""The servers behind a client's address, and the choice of one of them for each call.

Each server has a channel of its own. gRPC asks the server for its health all the time, and the channel is READY only
while the server is ready to serve. Among the ready servers the choice is:

1. not one where a call for this request has just failed (`avoid`), nor one that just now broke or refused any call or
   left it unanswered, if there is another;
2. the one that serves another choice (another output) of the same prompt (`CommonServer`), however many open calls it
   has;
3. the one that has computed, or is being asked for, the longest beginning of the request (`affinity`), unless it has
   too many open calls;
4. else the one with the fewest open calls; of equals, the one that was chosen least recently.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from baton.client.affinity import NO_BEGINNINGS, Beginnings, ServersByBeginning, beginnings_of
from baton.client.channel import (
    ChannelOptions,
    ServerTarget,
    Tls,
    authorized,
    channel_options,
    numeric_target,
    parse_target,
)
from baton.errors import (
    QUEUE_FULL,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Internal,
    ResourceExhausted,
    Unavailable,
    error_from_rpc,
)
from baton.v1 import inference_pb2, inference_pb2_grpc
from common.addresses import DnsName, address_of
from common.rpc.name_lookup import LookUp, LookUps, look_up

MIN_MARGIN_CALLS = 2
MARGIN_SHARE = 0.25
"""The bound on imbalance. A server that has a request's beginning in its cache is chosen only if it has at most this
many more open calls than the least busy server: 2, or a quarter of the mean over all servers if that is more.

So a conversation stays where it is while the load is about even, and a beginning that many requests share does not fill
one server while others are idle. A difference of two calls says nothing about the load, because calls differ in length.
"""
FAILED_FOR_S = 1.0
"""How long a server is passed over after it broke or refused a call. A server that fails at once always has few open
calls, and would attract all requests.
"""
ANSWER_TIMEOUT_S = 2.5
"""How long a server may take, in seconds, until it sends the head of its answer to a call, if another call may follow.

Servers send the head before they do any work, so a server that sends none hangs, or cannot be reached.
"""
NOT_ONE_ANSWER = "the server sent none or several answers instead of one"
HUNG_FOR_S = 20.0
"""How long a server is passed over after it did not answer in time. gRPC needs longer to see that a connection is dead,
and takes the server for ready until then.
"""
LOOK_UP_INTERVAL_S = 5.0
LOOK_UP_TIMEOUT_S = 5.0
"""How long one call waits in all for look-ups of the name while no server is ready."""
READY_TIMEOUT_S = 20.0
"""How long one call waits in all while no server is ready and connections are being made.

gRPC itself gives up a connection after the same time. But it waits for ever for a server that accepts the connection
and never reports its health.
"""

ASK_STATE_S = 0.02
"""How often an asyncio client asks for the state of the channels while calls wait for a ready server."""

STATE_THREADS_TIMEOUT_S = 10.0
"""How long closing a blocking client waits at most for gRPC's threads that report the states of channels. They notice
within 0.2 s that nobody listens any more, and later on a busy machine.
"""
_STATE_THREADS_LOOK_S = 0.01

_READY, _IDLE, _CONNECTING = (
    grpc.ChannelConnectivity.READY,
    grpc.ChannelConnectivity.IDLE,
    grpc.ChannelConnectivity.CONNECTING,
)
# round_robin, though there is only one address: unlike gRPC's default policy it follows the server's health, and it
# reconnects by itself.
_FOLLOWS_HEALTH = json.dumps(
    {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": "baton.v1.Inference"}}
)
_NEVER_IDLE_MS = 2**31 - 1
_LOOK_UP_ARG = "grpc.dns_min_time_between_resolutions_ms"


@dataclass(slots=True)
class CommonServer:
    """The server that several choices (outputs) of one prompt share, so that the prompt is computed and sent once.

    `server` is the one last chosen for a call of any of them, or None. The other choices go there however many calls
    it has.
    """

    server: Server | None = None


@dataclass(slots=True)
class Opening:
    """Says whether a call still asks a server for a request with these beginnings (marked prefixes, see `affinity`).

    That ends when the server accepts the request or the call ends.
    """

    beginnings: Beginnings
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Until when one call waits for a server, in times of `time.monotonic`.

    It waits for look-ups until `look_ups_until_s`, for servers that are being connected to until `until_s`, and never
    longer than `deadline_s`, its own deadline.
    """

    look_ups_until_s: float
    until_s: float
    deadline_s: float

    def pause_s(self, asked_s: float) -> float:
        """Returns the seconds from `asked_s` to the next time at which this wait may end: the end of the time for
        look-ups, of the time for connecting, or the call's deadline. The caller then calls `take` again.

        `asked_s` is a time before the last `take`, so that no end is missed that has passed since.
        """
        ends = (self.look_ups_until_s, self.until_s, self.deadline_s)
        return min(end_s - asked_s for end_s in ends if end_s > asked_s)


class _HeadFirst:
    """A channel for stubs that reads the one answer of a call as a stream of answers: gRPC tells of the head of an
    answer, before the answer itself, only for streams. It has no streams of requests.
    """

    def __init__(self, channel: Any) -> None:
        self.unary_stream = self.unary_unary = channel.unary_stream


class Server:
    """One server: its channel and stubs, and how many of this client's calls are open there."""

    def __init__(self, target: str, channel: Any, token: str | None) -> None:
        self.target = target
        self.channel = channel
        head_first: Any = _HeadFirst(channel)
        self.inference: Any = inference_pb2_grpc.InferenceStub(authorized(head_first, token))
        self.health: Any = health_pb2_grpc.HealthStub(head_first)
        self.num_open = 0
        self.last_chosen = 0
        self.failed_until_s = -math.inf
        # For BlockingServers, which are told the channel's state.
        self.state = _IDLE
        self.became_idle = False
        self.on_state: Callable[[grpc.ChannelConnectivity], None] | None = None


class Servers(ABC):
    """The servers of one client. The subclasses say which threads may use them.

    `address`, `tls`, `token` and `channel_overrides` are those that the client was made with. If the address is a name,
    a call starts a look-up of it, on a thread of its own, when the last one began at least `LOOK_UP_INTERVAL_S` ago.
    (gRPC's channel argument for that interval replaces it.) A server that the name no longer lists gets no new call,
    and its channel is closed when its calls have ended.

    Raises what `parse_target` raises, ValueError if metadata cannot carry the token, and OverflowError for a channel
    argument that does not fit in 32 bits.
    """

    _CHANNEL_OPTIONS: ClassVar[ChannelOptions] = {}

    def __init__(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        token: str | None = None,
        channel_overrides: ChannelOptions | None = None,
        look_up: LookUp = look_up,
        look_up_timeout_s: float = LOOK_UP_TIMEOUT_S,
        ready_timeout_s: float = READY_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._target = parse_target(address, tls)
        self._token = token
        self._credentials = None if tls is None else tls.credentials()
        self._options = _options(self._target, tls, {**self._CHANNEL_OPTIONS, **(channel_overrides or {})})
        self._look_up_timeout_s = look_up_timeout_s
        self._ready_timeout_s = ready_timeout_s
        self._clock = clock
        # Its lock is reentrant, because garbage collection may end a call, and so call `give_back`, while it is held.
        self._changed = threading.Condition()
        self._known = ServersByBeginning()
        self._servers: dict[str, Server] = {}
        self._leaving: dict[str, Server] = {}
        self._num_chosen = 0
        self._is_closed = False
        self._look_ups: LookUps | None = None
        if self._target.name is not None:
            self._look_ups = LookUps(
                name=self._target.name,
                look_up=look_up,
                hand_over=self._hand_over,
                interval_s=float((channel_overrides or {}).get(_LOOK_UP_ARG, LOOK_UP_INTERVAL_S * 1000)) / 1000,
                clock=clock,
            )
            # Raises here for a token or channel argument that cannot be sent.
            self._close_channel(Server("", self._open_channel("ipv4:127.0.0.1:1"), token))
        for each in self._target.addresses:
            self._add(each)
        if self._look_ups is not None:
            self._look_ups.look_if_due()

    def beginnings_of(self, request: inference_pb2.GenerateRequest) -> Beginnings:
        return NO_BEGINNINGS if self._target.is_single else beginnings_of(request)

    def take(
        self,
        beginnings: Beginnings = NO_BEGINNINGS,
        *,
        avoided: Collection[Server] = (),
        common: CommonServer | None = None,
        wait: Wait | None = None,
    ) -> Server | None:
        """Chooses the server of a call and counts the call as open there, until `give_back`.

        Later calls with the same `beginnings` prefer this server, until this call ends without having been accepted.
        `common`, if given, is set to the chosen server. Those in `avoided` are chosen only if there is no other.

        Returns None if no server is ready but one may soon be; the caller then waits for a change. `wait` bounds all
        waiting of the call; None means that it has not waited yet. If no server is ready or expected to be, or the
        call's deadline has passed, it returns any server, so that gRPC says why the call fails. Raises Cancelled if
        this object is closed. Raises Unavailable if no server is known, or if the wait is over while all servers are
        still being connected to.
        """
        with self._changed:
            if self._is_closed:
                raise Cancelled("the client is closed")
            if self._look_ups is not None:
                self._look_ups.look_if_due()
            servers = list(self._servers.values())
            able = servers
            if not self._target.is_single:
                states = [self._state(each) for each in servers]  # once, because they change meanwhile
                able = [each for each, state in zip(servers, states, strict=True) if state is _READY]
                if not able:
                    now_s = time.monotonic()
                    expected = {_IDLE, _CONNECTING}.intersection(states)
                    if wait is None or now_s < wait.deadline_s:
                        if self._is_looking() and (wait is None or now_s < wait.look_ups_until_s):
                            return None
                        if expected and (wait is None or now_s < wait.until_s):
                            return None
                        # Not those that are still expected: gRPC would wait for them.
                        servers = [each for each, state in zip(servers, states, strict=True) if state not in expected]
            if not servers:
                raise Unavailable(self._why_none())
            server = self._choose(beginnings, able or servers, avoided, common)
            if common is not None:
                common.server = server
            self._known.note_opening(beginnings, server.target)
            self._num_chosen += 1
            server.last_chosen = self._num_chosen
            server.num_open += 1
            return server

    def avoid(self, server: Server, avoided: set[Server]) -> bool:
        """Adds a server where a call has failed to those that the next call of the same request avoids.

        Returns whether another one is ready that does not hang. If none is, all have been tried, and `avoided` is
        emptied.
        """
        with self._changed:
            avoided.add(server)
            hangs_from_s = self._clock() + FAILED_FOR_S
            able = [each for each in self._servers.values() if each.failed_until_s <= hangs_from_s]
            others = [] if self._is_closed else [each for each in able if each not in avoided]
            if any(self._state(each) is _READY for each in others):
                return True
            avoided.clear()
            return False

    def give_back(self, server: Server, opening: Opening | None = None) -> None:
        """Must be called when a call has ended for which `take` returned `server`.

        `opening` is the call's; a call without beginnings has none.
        """
        with self._changed:
            server.num_open -= 1
            if opening is not None:
                self._end_opening(server, opening)
            self._close_if_done(server)

    def note_accepted(self, server: Server, opening: Opening) -> None:
        """Notes that the server has accepted the request of the call that `opening` belongs to."""
        with self._changed:
            self._known.note(opening.beginnings, server.target)
            self._end_opening(server, opening)

    def note_failed(self, server: Server, error: BatonError) -> None:
        """Notes that a call at the server has failed. Only errors that say something about the server count:
        RESOURCE_EXHAUSTED without a reason is gRPC's own, of a message that is too large.
        """
        if isinstance(error, Unavailable | Internal) or (isinstance(error, ResourceExhausted) and error.reason):
            with self._changed:
                server.failed_until_s = self._clock() + FAILED_FOR_S

    def pass_on(
        self, server: Server, failure: grpc.RpcError, avoided: set[Server], errors: dict[Server, BatonError]
    ) -> None:
        """Notes that a small call at the server has failed. Returns if the call may succeed at another one that is
        ready, or at the only one because its connection was just closing, and adds the error to `errors`, those of the
        call so far. Else it raises the error, of several refusals the one that named the earliest time, and in place of
        DEADLINE_EXCEEDED an earlier error of the same server.
        """
        error = error_from_rpc(failure)
        self.note_failed(server, error)
        is_full = error.reason == QUEUE_FULL
        if is_full or isinstance(error, Unavailable):
            may_repeat = self._target.is_single and server not in errors and not error.reason
            errors[server] = error
            if self.avoid(server, avoided) or may_repeat:
                return
        if is_full:
            error = min(errors.values(), key=_told_s)
        elif isinstance(error, DeadlineExceeded):
            error = errors.get(server, error)
        raise error from None

    def note_hung(self, server: Server, timeout_s: float) -> Unavailable:
        """Notes that the server has sent no head of an answer within `timeout_s`. Returns the call's error."""
        with self._changed:
            server.failed_until_s = self._clock() + HUNG_FOR_S
        address = server.target.removeprefix("ipv4:").removeprefix("ipv6:")
        return Unavailable(f"{address} has not answered within {timeout_s:.3g} s: it hangs or cannot be reached")

    @abstractmethod
    def wake(self) -> None:
        """Wakes all that wait for a change."""

    @abstractmethod
    def _open_channel(self, target: str) -> Any: ...

    @abstractmethod
    def _close_channel(self, server: Server) -> None:
        """Begins to close the channel of a server without calls. Does not wait. Any thread may call it."""

    @abstractmethod
    def _follow(self, server: Server) -> None:
        """Connects to the server. If changes of its channel's state are reported, each one wakes all that wait."""

    @abstractmethod
    def _state(self, server: Server) -> grpc.ChannelConnectivity: ...

    @abstractmethod
    def _hand_over(self, take: Callable[[], None]) -> None:
        """Called on a look-up's thread. Calls `_take_answer` on a thread that may change this object."""

    def _choose(
        self,
        beginnings: Beginnings,
        servers: Sequence[Server],
        avoided: Collection[Server],
        common: CommonServer | None,
    ) -> Server:
        others = [each for each in servers if each not in avoided] or servers
        now_s = self._clock()
        candidates = {each.target: each for each in [each for each in others if each.failed_until_s <= now_s] or others}
        shared = None if common is None else common.server
        if shared is not None and candidates.get(shared.target) is shared:
            return shared
        least_busy = min(candidates.values(), key=lambda each: (each.num_open, each.last_chosen))
        found = self._known.find(beginnings, candidates)
        if found is not None:
            mean = sum(each.num_open for each in candidates.values()) / len(candidates)
            if candidates[found].num_open <= least_busy.num_open + max(MIN_MARGIN_CALLS, MARGIN_SHARE * mean):
                return candidates[found]
        return least_busy

    def _end_opening(self, server: Server, opening: Opening) -> None:
        if not opening.has_ended:
            opening.has_ended = True
            self._known.forget_opening(opening.beginnings, server.target)

    def _is_looking(self) -> bool:
        since_s = None if self._look_ups is None else self._look_ups.looking_since_s
        return since_s is not None and self._clock() - since_s < self._look_up_timeout_s

    def _add(self, target: str) -> None:
        server = self._servers[target] = Server(target, self._open_channel(target), self._token)
        if not self._target.is_single:
            self._follow(server)

    def _close_if_done(self, server: Server) -> None:
        if self._leaving.get(server.target) is server and server.num_open == 0 and not self._is_closed:
            del self._leaving[server.target]
            self._close_channel(server)

    def _end(self) -> list[Server]:
        """Lets all further calls fail, and returns the servers whose channels are still open."""
        with self._changed:
            self._is_closed = True
            self.wake()
            return [*self._servers.values(), *self._leaving.values()]

    def _begin_wait(self, timeout_s: float | None, max_wait_s: float | None) -> Wait:
        now_s = time.monotonic()
        return Wait(
            look_ups_until_s=now_s + min(self._look_up_timeout_s, math.inf if max_wait_s is None else max_wait_s),
            until_s=now_s + min(self._ready_timeout_s, math.inf if max_wait_s is None else max_wait_s),
            deadline_s=math.inf if timeout_s is None else now_s + timeout_s,
        )

    def _why_none(self) -> str:
        if self._servers:
            return f"{self._address}: none of {len(self._servers)} services has become ready in time"
        assert self._look_ups is not None
        late = f"not found: no answer within {self._look_up_timeout_s:g} s"
        return f"{self._target.name}: {self._look_ups.error or late}"

    def _take_answer(self, take: Callable[[], None]) -> None:
        """Calls `take`, which takes a look-up's answer, and adds and removes servers as it says. If the look-up failed,
        the known servers stay.
        """
        assert self._look_ups is not None
        with self._changed:
            take()
            if self._is_closed:
                return
            found = dict.fromkeys(map(numeric_target, self._look_ups.found))
            for target in [each for each in self._servers if each not in found]:
                server = self._servers.pop(target)
                self._leaving[target] = server
                self._close_if_done(server)
            for target in found:
                if target in self._leaving:  # with its open calls
                    self._servers[target] = self._leaving.pop(target)
                elif target not in self._servers:
                    self._add(target)
            self.wake()


class BlockingServers(Servers):
    """The servers of a blocking client. Any thread may use them. gRPC's threads report the states of the channels."""

    # With gRPC's own retries a blocking call for a stream may never end if its connection closes as it begins: neither
    # its deadline nor a cancellation ends it (seen with grpcio 1.76 to 1.85, once in 50 on a busy machine).
    _CHANNEL_OPTIONS: ClassVar[ChannelOptions] = {"grpc.enable_retries": 0}

    def take_when_ready(
        self,
        beginnings: Beginnings = NO_BEGINNINGS,
        *,
        avoided: Collection[Server] = (),
        common: CommonServer | None = None,
        timeout_s: float | None,
        max_wait_s: float | None = None,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> Server:
        """Chooses the server of a call as `take` does, but waits until one is ready, or none is expected to be soon.

        `timeout_s` is the time left until the call's deadline; `max_wait_s` bounds only the wait. Raises Cancelled when
        `is_given_up()` returns True; whoever changes what it returns must call `wake`.
        """
        wait = self._begin_wait(timeout_s, max_wait_s)
        with self._changed:
            while not is_given_up():
                asked_s = time.monotonic()
                server = self.take(beginnings, avoided=avoided, common=common, wait=wait)
                if server is not None:
                    return server
                self._changed.wait(wait.pause_s(asked_s))
        raise Cancelled("the stream was closed")

    def close(self) -> None:
        """Closes all channels, which cancels the open calls."""
        servers = self._end()
        _stop_following(servers)
        for server in servers:
            server.channel.close()

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _open_channel(self, target: str) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(target, self._options)
        return grpc.secure_channel(target, self._credentials, self._options)

    def _close_channel(self, server: Server) -> None:
        def close() -> None:
            _stop_following([server])
            server.channel.close()

        threading.Thread(target=close, name="close-channel", daemon=True).start()

    def _follow(self, server: Server) -> None:
        # Weak, because gRPC's thread must not keep a client alive that nobody closed.
        servers, followed = weakref.ref(self), weakref.ref(server)

        def on_state(state: grpc.ChannelConnectivity) -> None:
            there, changed = servers(), followed()
            if there is not None and changed is not None:
                with there._changed:
                    changed.became_idle = state is _IDLE and changed.state is not _IDLE
                    changed.state = state
                    there._changed.notify_all()

        server.on_state = on_state
        server.channel.subscribe(on_state, try_to_connect=True)

    def _state(self, server: Server) -> grpc.ChannelConnectivity:
        if server.became_idle:  # the caller's channel arguments allow it; nothing else would connect it again
            server.became_idle = False
            _ask_to_connect(server.channel)
        return server.state

    def _hand_over(self, take: Callable[[], None]) -> None:
        self._take_answer(take)


class AsyncServers(Servers):
    """The servers of an asyncio client. Construct it in a running event loop, and call everything but `give_back`
    there.

    It asks for the states of the channels when a call is made, and one task asks repeatedly while calls wait for a
    server. It does not subscribe to changes, because gRPC could not end the subscription, and would report to an event
    loop that may be closed.
    """

    def __init__(self, address: str, **options: Any) -> None:
        self._loop = asyncio.get_running_loop()
        self._change = asyncio.Event()
        self._num_waiting = 0
        self._asking: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        super().__init__(address, **options)

    async def take_when_ready(
        self,
        beginnings: Beginnings = NO_BEGINNINGS,
        *,
        avoided: Collection[Server] = (),
        common: CommonServer | None = None,
        timeout_s: float | None,
        max_wait_s: float | None = None,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> Server:
        """Chooses the server of a call as `take` does, but waits until one is ready, or none is expected to be soon.

        `timeout_s` is the time left until the call's deadline; `max_wait_s` bounds only the wait. Raises Cancelled when
        `is_given_up()` returns True; whoever changes what it returns must call `wake`.
        """
        wait = self._begin_wait(timeout_s, max_wait_s)
        while not is_given_up():
            asked_s = time.monotonic()
            server = self.take(beginnings, avoided=avoided, common=common, wait=wait)
            if server is not None:
                return server
            await self._wait_for_change(wait.pause_s(asked_s))
        raise Cancelled("the stream was closed")

    async def close(self) -> None:
        """Closes all channels, which cancels the open calls."""
        if self._asking is not None:
            self._asking.cancel()
        for server in self._end():
            await server.channel.close()
        if self._closing:
            await asyncio.wait(self._closing)

    def wake(self) -> None:
        changed, self._change = self._change, asyncio.Event()
        changed.set()

    async def _wait_for_change(self, timeout_s: float) -> None:
        self._num_waiting += 1
        if self._asking is None:
            self._asking = self._loop.create_task(self._ask_while_calls_wait())
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._change.wait()
        finally:
            self._num_waiting -= 1

    async def _ask_while_calls_wait(self) -> None:
        """Wakes the waiting calls when the state of a channel has changed."""
        before: list[grpc.ChannelConnectivity] = []
        try:
            while self._num_waiting:
                states = [self._state(each) for each in self._servers.values()]
                if states != before or _READY in states:
                    self.wake()
                before = states
                await asyncio.sleep(ASK_STATE_S)
        finally:
            self._asking = None

    def _open_channel(self, target: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, self._options)
        return grpc.aio.secure_channel(target, self._credentials, self._options)

    def _close_channel(self, server: Server) -> None:
        self._on_loop(self._begin_to_close, server)

    def _begin_to_close(self, server: Server) -> None:
        closing = self._loop.create_task(server.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _follow(self, server: Server) -> None:
        self._state(server)

    def _state(self, server: Server) -> grpc.ChannelConnectivity:
        state: grpc.ChannelConnectivity = server.channel.get_state(try_to_connect=True)
        return state

    def _hand_over(self, take: Callable[[], None]) -> None:
        self._on_loop(self._take_answer, take)

    def _on_loop(self, callback: Callable[..., None], argument: object) -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(callback, argument)


def _told_s(error: BatonError) -> float:
    return math.inf if error.retry_after_s is None else error.retry_after_s


def _stop_following(servers: Sequence[Server]) -> None:
    """Unsubscribes from the servers' channel states, so that the channels can be closed.

    It waits until gRPC's threads that report the states have ended, because they fail if they ask a closed channel.
    They cannot be joined, and only gRPC's own record says which of them run.
    """
    followed = [server for server in servers if server.on_state is not None]
    for server in followed:
        server.channel.unsubscribe(server.on_state)
    give_up_s = time.monotonic() + STATE_THREADS_TIMEOUT_S
    while any(_is_polled(server.channel) for server in followed) and time.monotonic() < give_up_s:
        time.sleep(_STATE_THREADS_LOOK_S)


def _is_polled(channel: Any) -> bool:
    """Returns whether a thread of gRPC asks for the state of a blocking channel. If it cannot be known, one does."""
    return bool(getattr(getattr(channel, "_connectivity_state", None), "polling", True))


def _ask_to_connect(channel: grpc.Channel) -> None:
    def ignore(state: grpc.ChannelConnectivity) -> None: ...

    channel.subscribe(ignore, try_to_connect=True)
    channel.unsubscribe(ignore)


def _options(target: ServerTarget, tls: Tls | None, overrides: ChannelOptions | None) -> list[tuple[str, int | str]]:
    if target.is_single:
        return channel_options(tls, overrides)
    # The channels' states decide where calls go, so channels must reconnect by themselves, also without calls.
    more: dict[str, int | str] = {
        "grpc.service_config": _FOLLOWS_HEALTH,
        "grpc.client_idle_timeout_ms": _NEVER_IDLE_MS,
    }
    if isinstance(target.name, DnsName):  # servers and proxies see the name, as if gRPC had looked it up
        if tls is None:
            more["grpc.default_authority"] = address_of(target.name.host, target.name.port)
        elif tls.server_name is None:
            tls = dataclasses.replace(tls, server_name=target.name.host)
    return channel_options(tls, {**more, **(overrides or {})})
