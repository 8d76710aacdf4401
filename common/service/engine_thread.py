"""Runs an engine on a thread of its own, the only writer of engine state.

    edge (asyncio, main thread) ──post(command)──▶ EngineInbox ──▶ engine.step(commands) ──events──▶ Outbox ──▶ edge

The edge (the service's network side) sees the engine only as an `EnginePort`. A test can call `Engine.step` directly,
without this thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import structlog

from common.host.cores import set_own_num_threads
from common.telemetry.stats import EngineLoad, PoolCounts
from common.telemetry.timeline import ENGINE, Timeline

CommandT = TypeVar("CommandT")
TakenT = TypeVar("TakenT")
_CommandT_contra = TypeVar("_CommandT_contra", contravariant=True)

_NOTHING = EngineLoad(PoolCounts(0, 0), PoolCounts(0, 0), num_queued=0, num_running=0, num_steps=0)

_log = structlog.get_logger(__name__)


class Engine(Protocol[_CommandT_contra]):
    """An engine that is driven by steps. A step is synchronous. It uses no network, and the wall clock only for
    deadlines.
    """

    def step(self, commands: Sequence[_CommandT_contra]) -> None:
        """Applies `commands`, then does one iteration's work. Its events leave by the engine's Outbox, which may hold
        them back until the next step, `close` or a failure.
        """

    def idle_timeout_s(self) -> float:
        """Returns how long the loop may wait for a command before the next step; 0 while there is work to launch."""

    def be_woken_by(self, wake: Callable[[], None]) -> None:
        """Gives the engine a callback that ends the loop's wait for a command. Any thread may call `wake`.

        An engine that waits for a stream can have the stream call `wake`, and so needs to poll less often. Call
        `be_woken_by` once, before the first step.
        """

    def load(self) -> EngineLoad: ...

    def close(self) -> None:
        """Delivers the events that were held back, finishes the work in flight (within a bounded time) and stops the
        streams.
        """


class EnginePort(Protocol[_CommandT_contra]):
    """The part of an engine that an edge may use. All members may be used from any thread."""

    def post(self, command: _CommandT_contra) -> None: ...

    @property
    def load(self) -> EngineLoad:
        """The engine's load at the end of the last step, which may be told after that step's events."""

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs. While False, before the start and after a failure, posted commands get no answer."""


class EngineInbox(EnginePort[CommandT]):
    """The command queue of an engine. It can exist before the engine: the edge is built with it, then the engine with
    the edge.

            EngineInbox ◀─ edge ◀─ engine ◀─ EngineThread        each is built with those to its left

    Commands that are posted before the thread starts are part of its first step.
    """

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[CommandT | None] = queue.SimpleQueue()
        self._left: list[CommandT | None] = []  # commands that `take` left for the next step
        self._load = _NOTHING
        self._is_alive = False

    def post(self, command: CommandT) -> None:
        self._posted.put(command)

    @property
    def load(self) -> EngineLoad:
        return self._load

    @property
    def is_alive(self) -> bool:
        return self._is_alive

    def take(self, kind: type[TakenT]) -> list[TakenT]:
        """Removes and returns the commands of this type that were posted since the step began. Others wait for the next
        step.

        Only the engine calls this, within a step, for commands that may overtake others.
        """
        self._left += self._waiting()
        taken = [command for command in self._left if isinstance(command, kind)]
        self._left = [command for command in self._left if not isinstance(command, kind)]
        return taken

    # ---- for the engine's thread ------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Makes the engine's thread stop waiting in `drain`, without a command. Any thread may call it.

        If the thread is not waiting, its next `drain` does not wait.
        """
        self._posted.put(None)

    def drain(self, timeout_s: float) -> list[CommandT]:
        """Returns the posted commands. If there are none, waits up to `timeout_s` for one, or for `wake`."""
        commands, self._left = self._left, []
        if timeout_s > 0 and not commands:
            with suppress(queue.Empty):
                commands.append(self._posted.get(timeout=timeout_s))
        commands += self._waiting()
        return [command for command in commands if command is not None]

    def tell_load(self, load: EngineLoad) -> None:
        self._load = load

    def tell_alive(self, is_alive: bool) -> None:
        self._is_alive = is_alive

    def _waiting(self) -> Iterator[CommandT | None]:
        while not self._posted.empty():  # only this thread takes from it
            yield self._posted.get_nowait()


class EngineThread(Generic[CommandT]):
    """Runs an engine's loop on a thread of its own, and records its steps and loads on `timeline`.

    `on_death` is called once, on that thread, if the loop ends by an exception; the engine then answers nothing any
    more. `enter` is called on the thread before the first step.
    """

    def __init__(
        self,
        *,
        inbox: EngineInbox[CommandT],
        engine: Engine[CommandT],
        on_death: Callable[[BaseException], None],
        name: str,
        enter: Callable[[], None] = lambda: None,
        timeline: Timeline | None = None,
    ) -> None:
        self.inbox = inbox
        self._enter = enter
        self._death: BaseException | None = None
        self._track = (timeline or Timeline()).track(ENGINE)
        self._on_death = on_death
        self._stopping = threading.Event()
        self._num_steps_begun = 0
        self._is_stepping = False
        inbox.tell_load(engine.load())
        engine.be_woken_by(inbox.wake)
        self._thread = threading.Thread(target=self._run, args=(engine,), name=name, daemon=True)

    def start(self) -> None:
        self.inbox.tell_alive(True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs, as the inbox states it."""
        return self.inbox.is_alive

    @property
    def death(self) -> BaseException | None:
        """The exception that ended the loop, or None."""
        return self._death

    @property
    def is_stepping(self) -> bool:
        """Whether a step is in progress."""
        return self._is_stepping

    @property
    def num_steps_begun(self) -> int:
        """The number of steps begun so far, including those without any work."""
        return self._num_steps_begun

    def stop(self, timeout_s: float) -> bool:
        """Ends the loop after the step in progress. Returns False if it did not end within `timeout_s`."""
        self._end()
        self.inbox.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _end(self) -> None:
        self.inbox.tell_alive(False)
        self._stopping.set()

    def _run(self, engine: Engine[CommandT]) -> None:
        try:
            # This thread's own tensors are small: a second thread pool would only take cores from the forward's.
            set_own_num_threads(1)
            self._enter()
            while not self._stopping.is_set():
                commands = self.inbox.drain(engine.idle_timeout_s())
                self._num_steps_begun += 1
                self._is_stepping = True
                with self._track.span("step"):
                    engine.step(commands)
                load, before = engine.load(), self.inbox.load
                self.inbox.tell_load(load)
                if self._track.ring is not None and load != before:
                    self._track.count("rows", running=load.num_running, queued=load.num_queued)
                    self._track.count("slots", free=load.slots.free)
                self._is_stepping = False
            engine.close()
        except BaseException as error:
            self._death = error
            self._end()
            _log.critical("the engine loop died", exc_info=error)
            self._on_death(error)
