"""Samples the pair's services as long as someone watches the status page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from common.rpc.name_lookup import LookUp, look_up
from gateway.status.sampler import Sampler
from gateway.status.watched_decode import OpenClient

INTERVAL_S = 2.0
WINDOW_S = 60.0
IDLE_TIMEOUT_S = 30.0
TIMEOUT_S = 1.0
FIRST_ROUND_S = 0.5
"""How long the first viewer waits for figures at most. A round takes milliseconds, unless a service does not answer."""


class StatusCollector:
    """Samples the services in rounds, one every `interval_s`, and hands all viewers the same snapshot.

    Sampling starts with the first call of `look`, and ends `idle_timeout_s` after the last one; then connections and
    samples are dropped. `targets` are HOST:PORT or dns:///HOST:PORT, and each stands for every address of its name.
    `metrics_token` is sent to metrics targets. `timeout_s` limits each look-up and each answer. Construct it in a
    running event loop, and close it before the loop ends.
    """

    def __init__(
        self,
        *,
        metrics_targets: Sequence[str],
        decode_targets: Sequence[str],
        open_client: OpenClient,
        metrics_token: str = "",
        look_up: LookUp = look_up,
        interval_s: float = INTERVAL_S,
        window_s: float = WINDOW_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        timeout_s: float = TIMEOUT_S,
        first_round_s: float = FIRST_ROUND_S,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._metrics_targets = tuple(metrics_targets)
        self._decode_targets = tuple(decode_targets)
        self._open_client = open_client
        self._metrics_token = metrics_token
        self._look_up = look_up
        self._interval_s = interval_s
        self._window_s = window_s
        self._idle_timeout_s = idle_timeout_s
        self._timeout_s = timeout_s
        self._first_round_s = first_round_s
        self._clock = clock
        self._pause = pause
        self._last_look_s = clock()
        self._sampler: Sampler | None = None
        self._sampling: asyncio.Task[None] | None = None
        self._first_round = asyncio.Event()

    @property
    def is_sampling(self) -> bool:
        return self._sampling is not None and not self._sampling.done()

    def look(self) -> bytes:
        """Returns the `Snapshot` of the last round as JSON, at once. The first call starts the sampling.

        Until the first round has ended, the snapshot has no samples and its `age_s` is null.

        If the sampling has failed, raises its error once; the next call starts it again.
        """
        self._last_look_s = self._clock()
        if self._sampling is not None and self._sampling.done():
            ended, self._sampling = self._sampling, None
            ended.result()
        if self._sampling is None:
            self._sampler = self._new_sampler()
            self._first_round.clear()
            self._sampling = asyncio.create_task(self._sample(self._sampler))
        assert self._sampler is not None
        return self._sampler.document()

    async def first_look(self) -> bytes:
        """Returns what `look` returns, but waits for the end of the first round, for at most `first_round_s`."""
        self.look()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._first_round.wait(), self._first_round_s)
        return self.look()

    async def close(self) -> None:
        """Stops sampling and closes the connections. A second call does nothing."""
        if self._sampling is not None:
            self._sampling.cancel()
            with suppress(asyncio.CancelledError):
                await self._sampling
            self._sampling = None

    async def _sample(self, sampler: Sampler) -> None:
        try:
            while self._clock() - self._last_look_s < self._idle_timeout_s:
                began_s = self._clock()
                await sampler.sample()
                self._first_round.set()
                await self._pause(max(0.0, began_s + self._interval_s - self._clock()))
        finally:
            self._first_round.set()
            await sampler.close()

    def _new_sampler(self) -> Sampler:
        return Sampler(
            metrics_targets=self._metrics_targets,
            decode_targets=self._decode_targets,
            open_client=self._open_client,
            metrics_token=self._metrics_token,
            look_up=self._look_up,
            interval_s=self._interval_s,
            window_s=self._window_s,
            timeout_s=self._timeout_s,
            clock=self._clock,
        )
