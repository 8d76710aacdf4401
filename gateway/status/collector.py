"""Samples the pair's services as long as someone watches the status page, and serves the page."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import importlib.resources
import json
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.rpc.name_lookup import LookUp, look_up
from gateway.status.figures import (
    DECODE_PHASES,
    PREFILL_PHASES,
    Increase,
    acceptance_of,
    cached_share_of,
    outcomes_of,
    quantiles_of,
)
from gateway.status.snapshot import Gateway, Outdated, PairStatus, Rate, ServiceFigures, ServiceStatus, Snapshot
from gateway.status.watched import (
    Members,
    OpenClient,
    Scraper,
    WatchedDecode,
    WatchedService,
    unknown_decode,
    unknown_service,
)

_log = structlog.get_logger(__name__)


def pair_of(watched: Sequence[WatchedService], services: Sequence[ServiceStatus], now_s: float) -> PairStatus:
    """Combines the services' figures. `services` has the result of `view()` for each of `watched`, in the same order.

    A rate is the sum of the services' rates, each over the time for which that service was sampled.
    """
    decode = [each.increase() for each in watched if each.role == "decode"]
    prefill = [each.increase() for each in watched if each.role == "prefill"]
    of_decode = Increase.sum(decode)

    def rate(role: str, figure: Callable[[ServiceFigures], float | None]) -> float | None:
        known = [value for each in services if each.role == role and (value := figure(each.figures)) is not None]
        return sum(known) if known else None

    return PairStatus(
        requests_per_s=rate("decode", lambda figures: figures.requests_per_s),
        outcomes=outcomes_of(of_decode),
        output_tokens_per_s=rate("decode", lambda figures: figures.output_tokens_per_s),
        prompt_tokens_per_s=rate("decode", lambda figures: figures.prompt_tokens_per_s),
        handoff_sent_bytes_per_s=rate("prefill", lambda figures: figures.handoff_bytes_per_s),
        handoff_received_bytes_per_s=rate("decode", lambda figures: figures.handoff_bytes_per_s),
        handoff_held_bytes_per_s=rate("decode", lambda figures: figures.handoff_held_bytes_per_s),
        decode_cached_share=cached_share_of(of_decode),
        prefill_cached_share=cached_share_of(Increase.sum(prefill)),
        unsent_kv_bytes=sum(each.unsent_kv_bytes or 0 for each in services),
        num_queued=sum(each.num_queued or 0 for each in services if each.role == "decode"),
        num_running=sum(each.num_running or 0 for each in services if each.role == "decode"),
        num_row_retries=round(of_decode.total("baton_row_retries_total")),
        num_retractions=round(of_decode.total("baton_retractions_total")),
        phases={phase: quantiles_of(phase, decode) for phase in DECODE_PHASES}
        | {f"prefill_replica_{phase}": quantiles_of(phase, prefill) for phase in PREFILL_PHASES},
        acceptance=acceptance_of(of_decode),
        token_rates=_token_rates(watched, now_s),
    )


def _token_rates(watched: Sequence[WatchedService], now_s: float) -> tuple[Rate, ...]:
    by_round: defaultdict[float, float] = defaultdict(float)
    for step in (step for each in watched if each.role == "decode" for step in each.steps):
        by_round[step.to_s] += step.rate("baton_output_tokens_total")
    return tuple(Rate(now_s - at_s, rate) for at_s, rate in sorted(by_round.items()))


class Document:
    """A snapshot as JSON. It is serialised once for all viewers; only its age is added for each."""

    def __init__(self, snapshot: Snapshot) -> None:
        fields = dataclasses.asdict(snapshot)
        del fields["age_s"]
        self._others = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()

    @staticmethod
    def beside(gateway: Gateway, document: bytes) -> bytes:
        """Returns `document`, a snapshot as JSON, with the gateway's own state added."""
        return b'{"gateway":%s,%s' % (json.dumps(dataclasses.asdict(gateway)).encode(), document[1:])

    def at_age(self, age_s: float | None) -> bytes:
        return b'{"age_s":%s,%s' % (json.dumps(age_s).encode(), self._others[1:])


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
        await self._scraper.aclose()


INTERVAL_S = 2.0
_WINDOW_S = 60.0
_IDLE_TIMEOUT_S = 30.0
TIMEOUT_S = 1.0  # of each look-up and each answer
FIRST_ROUND_S = 0.5
"""How long the first viewer waits for figures at most. A round takes milliseconds, unless a service does not answer."""


class StatusCollector:
    """Samples the services in rounds, one every `INTERVAL_S`, and hands all viewers the same snapshot.

    Sampling starts with the first call of `look`, and ends `_IDLE_TIMEOUT_S` after the last one; then connections and
    samples are dropped. A target is HOST:PORT, dns:///HOST:PORT or file:///PATH, and stands for all addresses found
    there. `metrics_token` is sent to metrics targets. Construct it in a running event loop, and close it before the
    loop ends.
    """

    def __init__(
        self,
        *,
        metrics_targets: Sequence[str],
        decode_targets: Sequence[str],
        open_client: OpenClient,
        metrics_token: str = "",
        look_up: LookUp = look_up,
        first_round_s: float = FIRST_ROUND_S,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._metrics_targets = tuple(metrics_targets)
        self._decode_targets = tuple(decode_targets)
        self._open_client = open_client
        self._metrics_token = metrics_token
        self._look_up = look_up
        self._first_round_s = first_round_s
        self._clock = clock
        self._pause = pause
        self._last_look_s = clock()
        self._sampler: Sampler | None = None
        self._sampling: asyncio.Task[None] | None = None
        self._first_round = asyncio.Event()

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
        """Stops sampling and closes the connections. A second call does nothing. If the sampling has failed, its error
        is logged, so that whoever ends the gateway goes on.
        """
        if self._sampling is None:
            return
        self._sampling.cancel()
        await asyncio.wait({self._sampling})
        if not self._sampling.cancelled() and (error := self._sampling.exception()) is not None:
            _log.error("status_sampling_failed", exc_info=error)
        self._sampling = None

    async def _sample(self, sampler: Sampler) -> None:
        try:
            while self._clock() - self._last_look_s < _IDLE_TIMEOUT_S:
                began_s = self._clock()
                await sampler.sample()
                self._first_round.set()
                await self._pause(max(0.0, began_s + INTERVAL_S - self._clock()))
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
            interval_s=INTERVAL_S,
            window_s=_WINDOW_S,
            timeout_s=TIMEOUT_S,
            clock=self._clock,
        )


_INLINE = {kind: re.compile(f"<{kind}>(.*?)</{kind}>", re.DOTALL) for kind in ("script", "style")}


def status_routes(collector: StatusCollector, gateway: Callable[[], Gateway]) -> list[Route]:
    """Returns the routes of the status page: `/` is the page, `/status.json` a `Snapshot` beside the state that
    `gateway` returns. Neither may be cached.
    """
    page = importlib.resources.files("gateway.status").joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "cache-control": "no-store",
        "content-security-policy": content_security_policy(page),
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    async def show(_request: Request) -> Response:
        return Response(page, media_type="text/html", headers=headers)

    async def figures(_request: Request) -> Response:
        document = Document.beside(gateway(), await collector.first_look())
        return Response(document, media_type="application/json", headers=headers)

    return [Route("/", show), Route("/status.json", figures)]


def content_security_policy(page: str) -> str:
    """Returns the page's Content-Security-Policy.

    It allows the page's own script and style, by their hashes, and requests to its own origin; nothing else.
    """
    allowed = "; ".join(f"{kind}-src {_hashes(kind, page)}" for kind in _INLINE)
    return (
        f"default-src 'none'; {allowed}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(kind: str, page: str) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in _INLINE[kind].findall(page))
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
