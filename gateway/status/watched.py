"""The services that the status page watches: looks up their addresses, and asks each service."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import httpx2

from baton.client import AsyncClient, Tls
from baton.errors import BatonError
from baton.server_info import InferenceLoad
from common.addresses import DnsName, address_of, host_and_port, is_name, parse_name
from common.rpc.bearer_tokens import authorization
from common.rpc.errors import unconnected_words
from common.rpc.name_lookup import LookedUpName, LookUp
from gateway.status.figures import (
    Exposition,
    Increase,
    Interval,
    SampleWindow,
    figures_of,
    parse_exposition,
    pool_of,
    role_of,
)
from gateway.status.snapshot import Decode, ReplicaFigures, ServiceStatus


@dataclass(frozen=True, slots=True)
class Address:
    """One address of a target: the `target` as configured, the host that its certificate is for, and the
    numeric HOST:PORT."""

    target: str
    host: str
    numeric: str


class TargetAddresses:
    """The addresses of one target, as of the last `refresh`: `found` by the last look-up that succeeded, and the
    `reason` why the last one failed, or "" if it did not.

    `target` is "HOST:PORT", "dns:///HOST:PORT" or "file:///PATH".
    """

    def __init__(self, target: str, *, look_up: LookUp, timeout_s: float) -> None:
        self.target = target
        name = parse_name(target) if is_name(target) else DnsName(*host_and_port(target))
        self._name = LookedUpName(name=name, look_up=look_up, timeout_s=timeout_s)
        self.found: tuple[Address, ...] = ()
        self.reason = self._name.error

    async def refresh(self) -> None:
        """Looks the name up again, for at most `timeout_s`. Never raises."""
        await self._name.refresh()
        self.found = tuple(
            Address(self.target, self._name.name.certified_host or host_and_port(number)[0], number)
            for number in self._name.found
        )
        self.reason = self._name.error


MAX_MEMBERS = 64
"""The most addresses that are sampled. It limits the connections of a round and the samples that are kept."""


class Member(Protocol):
    async def sample(self, now_s: float) -> None:
        """Asks the service for its state once, within a time limit. `now_s` is the time of this round.

        An error of the service is recorded, not raised.
        """

    async def close(self) -> None: ...


MemberT = TypeVar("MemberT", bound=Member)


class Members(Generic[MemberT]):
    """Keeps one member, such as a sampled service, for each address of `targets`; at most `MAX_MEMBERS` in all.

    `join` makes the member of an address when the address is found. The member is closed when its address is gone.
    """

    def __init__(
        self,
        targets: Sequence[str],
        *,
        join: Callable[[Address], MemberT],
        look_up: LookUp,
        timeout_s: float,
    ) -> None:
        self._targets = [TargetAddresses(target, look_up=look_up, timeout_s=timeout_s) for target in targets]
        self._join = join
        self._by_address: dict[Address, MemberT] = {}
        self._awaited = dict.fromkeys(targets)

    @property
    def all(self) -> tuple[MemberT, ...]:
        """The members, in the order of targets, then of addresses. A member of two targets appears once."""
        return tuple(
            self._by_address[address]
            for target in self._targets
            for address in target.found
            if address in self._by_address
        )

    @property
    def unknown(self) -> tuple[tuple[str, str], ...]:
        """The targets that have no address, each with the reason."""
        return tuple((target.target, target.reason) for target in self._targets if not target.found)

    @property
    def awaited(self) -> tuple[str, ...]:
        """The targets that have not been sampled yet."""
        return tuple(self._awaited)

    @property
    def outdated(self) -> tuple[tuple[str, str], ...]:
        """The targets whose last look-up failed, each with the reason. Their known members are still sampled."""
        return tuple((target.target, target.reason) for target in self._targets if target.found and target.reason)

    @property
    def num_left_out(self) -> int:
        return len({each.numeric for target in self._targets for each in target.found}) - len(self._by_address)

    async def sample(self, now_s: float) -> None:
        """Looks up every target and then samples its members. All targets are handled at the same time."""
        await asyncio.gather(*(self._sample_target(target, now_s) for target in self._targets))

    async def _sample_target(self, target: TargetAddresses, now_s: float) -> None:
        before = target.found
        await target.refresh()
        gone = [self._by_address.pop(each) for each in before if each not in target.found and each in self._by_address]
        for address in target.found:
            taken = {each.numeric for each in self._by_address}
            if address.numeric not in taken and len(taken) < MAX_MEMBERS:
                self._by_address[address] = self._join(address)
        here = [self._by_address[address] for address in target.found if address in self._by_address]
        await asyncio.gather(*(member.close() for member in gone), *(member.sample(now_s) for member in here))
        self._awaited.pop(target.target, None)

    async def close(self) -> None:
        members, self._by_address = list(self._by_address.values()), {}
        await asyncio.gather(*(member.close() for member in members))


MAX_BYTES = 256 << 10
"""The largest accepted answer in bytes; services send about 20 KiB."""
MAX_CONNECTIONS = 64


class ScrapeFailed(Exception):
    """A service's metrics could not be fetched. The message says why, in words for the status page."""


class Scraper:
    """Fetches /metrics from services. It ignores proxy settings of the environment and follows no redirect."""

    def __init__(self, *, timeout_s: float, token: str = "") -> None:
        self._timeout_s = timeout_s
        shown = dict(authorization(token)) if token else {}
        self._client = httpx2.AsyncClient(
            timeout=timeout_s,
            limits=httpx2.Limits(max_connections=MAX_CONNECTIONS),
            trust_env=False,
            follow_redirects=False,
            # A compressed answer could be small and unpack to a huge one.
            headers={"accept": "text/plain", "accept-encoding": "identity", **shown},
        )

    async def scrape(self, address: str) -> Exposition:
        """Fetches and parses the metrics of the service at HOST:PORT, within `timeout_s`. Raises ScrapeFailed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                text = await self._text(f"http://{address}/metrics")
                return parse_exposition(text)  # takes milliseconds
        except TimeoutError:
            raise ScrapeFailed(f"no whole answer within {self._timeout_s:g} s") from None
        except httpx2.ConnectError as error:
            raise ScrapeFailed(unconnected_words(address, _cause_of(error))) from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ScrapeFailed(str(error) or type(error).__name__) from error
        except (ValueError, IndexError) as error:  # prometheus_client raises either for a malformed line
            raise ScrapeFailed(f"not Baton's metrics: {error}"[:200]) from error

    async def _text(self, url: str) -> str:
        body = bytearray()
        async with self._client.stream("GET", url) as response:
            if response.status_code != httpx2.codes.OK:
                raise ScrapeFailed(f"answered {response.status_code}")
            async for part in response.aiter_raw():
                body += part
                if len(body) > MAX_BYTES:
                    raise ScrapeFailed(f"more than {MAX_BYTES} bytes")
        return body.decode()

    async def aclose(self) -> None:
        await self._client.aclose()


def _cause_of(error: httpx2.ConnectError) -> str:
    """Returns the system's words for a connection that failed. The HTTP client's own do not say why."""
    root: BaseException = error
    while (cause := root.__cause__ or root.__context__) is not None:
        root = cause
    number = root.errno if isinstance(root, OSError) else None
    return os.strerror(number) if number is not None and number > 0 else str(root)  # a resolver's are negative


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


MAX_REASON_CHARS = 200


class LoadClient(Protocol):
    async def load(self) -> InferenceLoad:
        """Returns the service's load. Raises BatonError."""

    async def close(self) -> None: ...


OpenClient = Callable[[Address], LoadClient]


def open_clients(*, tls: Tls | None, token: str | None) -> OpenClient:
    """Returns a function that opens a client of one decode service.

    With TLS, the service's certificate must be for the host name that was looked up, unless `tls` names another.
    """

    def open_client(address: Address) -> LoadClient:
        own = tls and dataclasses.replace(tls, server_name=tls.server_name or address.host)
        return AsyncClient(address.numeric, tls=own, token=token)

    return open_client


class WatchedDecode:
    """A decode service whose load is asked for once a round, for at most `timeout_s`."""

    def __init__(self, address: Address, *, open_client: OpenClient, timeout_s: float) -> None:
        self._address = address
        self._client = open_client(address)
        self._timeout_s = timeout_s
        self._load: InferenceLoad | None = None
        self._reason = "not asked yet"

    async def sample(self, now_s: float) -> None:
        self._load = None
        try:
            async with asyncio.timeout(self._timeout_s):
                self._load = await self._client.load()
        except TimeoutError:
            self._reason = f"no answer within {self._timeout_s:g} s"
        except BatonError as error:
            self._reason = str(error)[:MAX_REASON_CHARS]
        else:
            self._reason = ""

    async def close(self) -> None:
        await self._client.close()

    def view(self) -> Decode:
        load = self._load
        return Decode(
            target=self._address.target,
            address=self._address.numeric,
            is_reachable=load is not None,
            reason=self._reason,
            instance_id="" if load is None else load.instance_id,
            num_queued=None if load is None else load.num_queued,
            num_running=None if load is None else load.num_running,
            is_degraded=load is not None and load.is_degraded,
            prefill_replicas=() if load is None else _replicas(load),
        )


def unknown_decode(target: str, reason: str) -> Decode:
    """Returns what the status page shows of a decode target that has no address."""
    return Decode(target, "", False, reason, "", None, None, False, ())


def _replicas(load: InferenceLoad) -> tuple[ReplicaFigures, ...]:
    return tuple(
        ReplicaFigures(each.address, each.is_ready, each.num_rows, each.num_known_tokens, each.reason)
        for each in load.prefill_replicas
    )
