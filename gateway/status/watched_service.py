"""Samples one service's metrics and computes what the status page shows of it."""

from __future__ import annotations

from common.addresses import address_of, host_and_port
from gateway.status.addresses import Address
from gateway.status.exposition import Exposition
from gateway.status.figures import figures_of, pool_of, role_of
from gateway.status.increase import Increase
from gateway.status.scraper import ScrapeFailed, Scraper
from gateway.status.snapshot import ServiceStatus
from gateway.status.window import Interval, SampleWindow


class WatchedService:
    """A service whose metrics are fetched once a round. `view` returns its figures over the last `window_s` seconds."""

    def __init__(self, address: Address, *, scraper: Scraper, window_s: float) -> None:
        self._address = address
        self._scraper = scraper
        self._window = SampleWindow(window_s=window_s)
        self._now_s = 0.0
        self._reason = "not asked yet"
        self.role = ""
        self._grpc_address = ""

    @property
    def current(self) -> Exposition | None:
        """The metrics of the last round, or None if the service could not be reached then."""
        return None if self._reason else self._window.latest

    @property
    def steps(self) -> tuple[Interval, ...]:
        return self._window.steps

    @property
    def span_s(self) -> float:
        """The seconds from the oldest sample to the last round, even if the service did not answer in that round."""
        return 0.0 if self._window.first_s is None else self._now_s - self._window.first_s

    def increase(self) -> Increase:
        return self._window.increase()

    async def sample(self, now_s: float) -> None:
        try:
            exposition = await self._scraper.scrape(self._address.numeric)
        except ScrapeFailed as failure:
            self._reason = str(failure)
        else:
            self._window.add(now_s, exposition)
            self.role, self._reason = role_of(exposition), ""
            if port := _count(exposition, "baton_grpc_port"):
                self._grpc_address = address_of(host_and_port(self._address.numeric)[0], port)
        self._window.forget(now_s)
        self._now_s = now_s

    async def close(self) -> None:
        """Does nothing, because the scraper is shared and not owned."""

    def view(self) -> ServiceStatus:
        current = self.current
        return ServiceStatus(
            target=self._address.target,
            address=self._address.numeric,
            grpc_address=self._grpc_address,
            role=self.role,
            is_reachable=current is not None,
            is_ready=_count(current, "baton_ready") == 1,
            reason=self._reason,
            rows=None if current is None else pool_of("baton_rows", current),
            kv_slots=None if current is None else pool_of("baton_kv_slots", current),
            num_queued=_count(current, "baton_queued_requests"),
            num_running=_count(current, "baton_running_requests"),
            unsent_kv_bytes=_count(current, "baton_unsent_kv_bytes"),
            figures=figures_of(self.role, self.increase(), self.span_s),
        )


def unknown_service(target: str, reason: str) -> ServiceStatus:
    """Returns what the status page shows of a metrics target that has no address."""
    return ServiceStatus(
        target, "", "", "", False, False, reason, None, None, None, None, None, figures_of("", Increase({}), 0.0)
    )


def _count(exposition: Exposition | None, name: str) -> int | None:
    value = None if exposition is None else exposition.gauge(name)
    return None if value is None else round(value)
