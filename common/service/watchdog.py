"""Watches whether an engine makes progress. It runs on the event loop, since the engine's own thread may be what hangs.

    engine thread: steps begun ─┐
    streams: operations done ───┼─poll─▶ Watchdog ──▶ is_well: readiness
    model: layers begun ────────┤                └──▶ lost: every request fails, the process ends
    ranks: ended, waited for ───┘

A part is stalled if it has work and shows no sign of progress. The amount of work does not matter, so a slow machine is
not mistaken for a dead one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from common.device.stream import LONGEST_LOOK_S, Device, StreamKind, StreamProgress
from common.errors import EngineLost, EngineStalled

UNREADY_AFTER_S = 3.5
"""A part that makes no progress for this long makes the service unready.

With one poll of the watchdog and one of readiness, 0.1 s each, health reports it within 5 s.
"""
LOOK_INTERVAL_S = 0.1

_log = structlog.get_logger(__name__)


class WatchedEngine(Protocol):
    """The state of an EngineThread that the watchdog reads."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def death(self) -> BaseException | None: ...

    @property
    def is_stepping(self) -> bool: ...

    @property
    def num_steps_begun(self) -> int: ...


class WatchedRanks(Protocol):
    """The state of the other ranks that the watchdog reads."""

    @property
    def loss(self) -> str | None: ...

    @property
    def behind(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _Sign:
    """The state of one watched part, a stream or the engine's step.

    `is_busy` says whether it has work. `mark` is a value that changes when it makes progress.
    """

    part: str
    is_busy: bool
    mark: Hashable


class Watchdog:
    """Watches an engine's step and streams for progress. Use it from the event loop only.

    Each poll adds at most LONGEST_LOOK_S to the time for which a part counts as stalled. An engine that is lost stays
    lost, whatever it does later.
    """

    def __init__(
        self,
        *,
        engine: WatchedEngine,
        device: Device,
        num_layers_begun: Callable[[], int],
        ranks: WatchedRanks | None = None,
        stall_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._device = device
        self._num_layers_begun = num_layers_begun
        self._ranks = ranks
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._looked_s = clock()
        self._marks: dict[str, Hashable] = {}
        self._still_s: dict[str, float] = {}
        self._stalled: dict[str, float] = {}  # the parts that are stalled, and for how many seconds
        self._lost: EngineLost | None = None

    @property
    def is_well(self) -> bool:
        """Whether the engine was alive at the last poll, and no part was stalled. False once the engine is lost."""
        return self._lost is None and self._engine.is_alive and not self._stalled

    @property
    def lost(self) -> EngineLost | None:
        """Why the engine can no longer serve: it died or cannot be watched, its device or another rank failed, or it
        stalled for too long. None while it can.
        """
        return self._lost

    def look(self) -> None:
        """Polls the engine's step and streams once. Call it often: what changed between two polls has made progress."""
        if self._lost is not None:
            return
        now_s = self._clock()
        passed_s, self._looked_s = min(now_s - self._looked_s, LONGEST_LOOK_S), now_s
        streams = self._device.progress()
        for sign in self._signs(streams):
            if sign.is_busy and self._marks.get(sign.part) == sign.mark:
                self._still_s[sign.part] += passed_s
            else:
                self._still_s[sign.part] = 0.0
            self._marks[sign.part] = sign.mark
        self._lost = self._loss(streams)
        self._note_stalled()

    async def follow(self, on_lost: Callable[[EngineLost], None]) -> None:
        """Polls until the engine is lost, then calls `on_lost` and returns."""
        while self._lost is None:
            await asyncio.sleep(LOOK_INTERVAL_S)
            try:
                self.look()
            except Exception as error:  # an engine that cannot be watched must not get requests
                self._lost = EngineLost(f"the engine cannot be watched: {error!r}")
        _log.critical("engine_lost", reason=str(self._lost))
        on_lost(self._lost)

    def _signs(self, streams: Sequence[StreamProgress]) -> Iterator[_Sign]:
        """Yields the state of each stream, and of the engine's step.

        A layer that the model begins counts as progress of the compute streams, but not of other streams, since a copy
        may hang while the model runs. The step may wait for any stream, so any stream's progress counts as the step's.
        """
        layers = self._num_layers_begun()
        for stream in streams:
            own = (stream.num_done, layers if stream.kind is StreamKind.COMPUTE else 0)
            yield _Sign(f"stream {stream.name}", stream.is_busy, own)
        every = (self._engine.num_steps_begun, layers, *(stream.num_done for stream in streams))
        yield _Sign("the engine's step", self._engine.is_stepping, every)

    def _loss(self, streams: Sequence[StreamProgress]) -> EngineLost | None:
        if self._ranks is not None and self._ranks.loss is not None:
            return EngineLost(self._ranks.loss)
        if not self._engine.is_alive:
            death = self._engine.death
            return EngineLost("the engine died" if death is None else f"the engine died: {_told(death)}")
        for stream in streams:
            if stream.error is not None:
                return EngineLost(f"stream {stream.name} failed: {_told(stream.error)}")
        for part, still_s in self._still_s.items():
            if still_s >= self._stall_timeout_s:
                waits = f", and waits for {self._behind}" if self._behind else ""
                return EngineStalled(f"{part} has not moved for {self._stall_timeout_s} s{waits}")
        return None

    @property
    def _behind(self) -> str:
        return "" if self._ranks is None else self._ranks.behind

    def _note_stalled(self) -> None:
        stalled = {part: still_s for part, still_s in self._still_s.items() if still_s >= UNREADY_AFTER_S}
        for part in sorted(stalled.keys() - self._stalled.keys()):
            waits = {"waits_for": self._behind} if self._behind else {}
            _log.error("engine_stalled", part=part, still_s=UNREADY_AFTER_S, **waits)
        for part in sorted(self._stalled.keys() - stalled.keys()):
            _log.info("engine_moves_again", part=part, still_s=round(self._stalled[part], 1))
        self._stalled = stalled


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
