"""Samples services for one period: from the first viewer until a while after the last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from common.rpc.name_lookup import LookUp
from gateway.status.document import Document
from gateway.status.members import Members
from gateway.status.pair import pair_of
from gateway.status.scraper import Scraper
from gateway.status.snapshot import Outdated, Snapshot
from gateway.status.watched_decode import OpenClient, WatchedDecode, unknown_decode
from gateway.status.watched_service import WatchedService, unknown_service


class Sampler:
    """Samples the metrics of `metrics_targets` and the load of the services `decode_targets`. Close it at the end."""

    def __init__(
        self,
        *,
        metrics_targets: Sequence[str],
        decode_targets: Sequence[str],
        open_client: OpenClient,
        look_up: LookUp,
        interval_s: float,
        window_s: float,
        timeout_s: float,
        clock: Callable[[], float],
        metrics_token: str = "",
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._scraper = Scraper(timeout_s=timeout_s, token=metrics_token)
        self._services = Members(
            metrics_targets,
            join=partial(WatchedService, scraper=self._scraper, window_s=window_s),
            look_up=look_up,
            timeout_s=timeout_s,
        )
        self._decode = Members(
            decode_targets,
            join=partial(WatchedDecode, open_client=open_client, timeout_s=timeout_s),
            look_up=look_up,
            timeout_s=timeout_s,
        )
        self._sampled_s: float | None = None
        self.snapshot = self._snapshot(clock())
        """The figures after the last complete round."""
        self._document = Document(self.snapshot)

    async def sample(self) -> None:
        """Samples every service once. Returns after twice `timeout_s` at most."""
        now_s = self._clock()
        await asyncio.gather(self._services.sample(now_s), self._decode.sample(now_s))
        self._sampled_s = now_s
        self.snapshot = self._snapshot(now_s)
        self._document = Document(self.snapshot)

    def document(self) -> bytes:
        """Returns `snapshot` as JSON with its present age. This is cheap, because only the age is serialised.

        Before the end of the first round the document has what is known so far.
        """
        if self._sampled_s is None:
            return Document(self._snapshot(self._clock())).at_age(None)
        return self._document.at_age(self._clock() - self._sampled_s)

    def _snapshot(self, now_s: float) -> Snapshot:
        watched = self._services.all
        views = [each.view() for each in watched]
        return Snapshot(
            interval_s=self._interval_s,
            age_s=None if self._sampled_s is None else now_s - self._sampled_s,
            window_s=max((each.span_s for each in watched), default=0.0),
            awaited=(*self._services.awaited, *self._decode.awaited),
            num_left_out=self._services.num_left_out + self._decode.num_left_out,
            outdated=tuple(Outdated(*each) for each in (*self._services.outdated, *self._decode.outdated)),
            pair=pair_of(watched, views, now_s),
            services=(*views, *(unknown_service(*unknown) for unknown in self._services.unknown)),
            decode=(
                *(each.view() for each in self._decode.all),
                *(unknown_decode(*unknown) for unknown in self._decode.unknown),
            ),
        )

    async def close(self) -> None:
        await asyncio.gather(self._services.close(), self._decode.close())
        await self._scraper.close()
