"""How many prefill and decode services a load wants.

`sample_loads` asks the services for their role and load, again and again for a while. `advise` is a pure function of
what they reported. The demand of each kind is counted in services: how many of them the load would keep busy all the
time.

    prefill   the services that computed, on average, and those that would work off the waiting prompts in one window
    decode    the pools' share that running requests hold, and that the waiting ones would hold

The number of services follows the demand with hysteresis. It grows when the window's mean demand is above HIGH times
the number, and shrinks only if the peak demand is below LOW times the number left. So a load that goes up and down
within the window changes nothing, and a change does not cause its own reversal.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

from baton.client import Tls
from baton.errors import BatonError
from baton.roles import RoleClient
from baton.server_info import InferenceLoad, PrefillLoad
from common.role import Role

HIGH, LOW = 0.8, 0.5
"""There are too few services of a kind if its mean demand is above HIGH times their number, and one too many if its
peak demand is below LOW times the number without that one.
"""
NUM_PARTS = 4
"""The number of equal parts of the window; the peak is the largest mean demand of a part."""
MIN_SAMPLES = 2 * NUM_PARTS
_EPSILON = 1e-9
CALL_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One report of a prefill service, made at `at_s`.

    `is_settled` says whether it was ready and not about to change its role. `num_computed_tokens` counts the tokens
    that it has computed since its start, None if it does not report them. `num_uncomputed_tokens` counts the remaining
    tokens of queued and running prompts.
    """

    at_s: float
    instance_id: str
    is_settled: bool
    is_computing: bool
    num_uncomputed_tokens: int
    num_computed_tokens: int | None


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """One report of a decode service, made at `at_s`.

    `is_settled` says whether it was ready and not about to change its role.
    `running_share` is the share of its pool that running requests hold, of rows or of slots, whichever is larger.
    `num_running` counts these requests, and `num_arriving` those that have a row and wait for a prefill service.
    `num_queued` wait for a row.
    """

    at_s: float
    instance_id: str
    is_settled: bool
    running_share: float
    num_running: int
    num_arriving: int
    num_queued: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Need:
    """How many services of a kind exist and are wanted. `mean` and `peak` are the demand, in services.

    `now` counts those that answered last time. `wanted` is None while advice is held back, so that nobody acts on it.
    """

    now: int
    wanted: int | None
    mean: float
    peak: float

    @property
    def num_more(self) -> int:
        """How many more services are wanted than there are, below 0 if fewer, and 0 while `wanted` is None."""
        return 0 if self.wanted is None else self.wanted - self.now


@dataclass(frozen=True, slots=True)
class Advice:
    """The planner's advice for a load.

    `switches` maps addresses to the role that they should have, where one kind has too many services and the other too
    few. `missing` says what could not be known, and `holds` why no change is advised now, or is "".
    """

    prefill: Need
    decode: Need
    switches: Mapping[str, Role]
    missing: tuple[str, ...]
    holds: str


def advise(
    prefill: Mapping[str, Sequence[PrefillSample]],
    decode: Mapping[str, Sequence[DecodeSample]],
    *,
    missing: Sequence[str] = (),
) -> Advice:
    """Returns the advice for one window. `prefill` and `decode` map the address of each service to its samples of this
    window, in the order of time. `missing` says which answers of services are missing; it is passed on.

    No change is advised if answers are missing or too few, or if a service began, changed its role or was not ready
    within the window.
    """
    notes = list(missing)
    times = [each.at_s for services in (prefill, decode) for samples in services.values() for each in samples]
    begin_s, end_s = min(times, default=0.0), max(times, default=0.0)
    parts = _WindowParts(begin_s, end_s)
    holds = _why_hold(prefill, decode, missing)
    rate = _tokens_per_busy_s(prefill)
    if prefill and rate is None and any(each.num_uncomputed_tokens for samples in prefill.values() for each in samples):
        notes.append("how fast prefill services compute: they computed nothing, or do not report num_computed_tokens")
    window_s = max(end_s - begin_s, _EPSILON)
    of_prefill = [
        parts.means([(each.at_s, _prefill_demand(each, rate, window_s)) for each in samples])
        for samples in prefill.values()
    ]
    of_decode = [parts.means([(each.at_s, _decode_demand(each)) for each in samples]) for samples in decode.values()]
    for kind, services in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        if not services:
            notes.append(f"the demand for {kind}: no {kind} service answered")
    need_of_prefill = _need(len(prefill), of_prefill, is_held=bool(holds))
    need_of_decode = _need(len(decode), of_decode, is_held=bool(holds))
    return Advice(
        prefill=need_of_prefill,
        decode=need_of_decode,
        switches=_switches(
            {Role.PREFILL: need_of_prefill, Role.DECODE: need_of_decode},
            {
                Role.PREFILL: dict(zip(prefill, map(sum, of_prefill), strict=True)),
                Role.DECODE: dict(zip(decode, map(sum, of_decode), strict=True)),
            },
        ),
        missing=tuple(notes),
        holds=holds,
    )


@dataclass(frozen=True, slots=True)
class _WindowParts:
    """The parts of a window from `begin_s` to `end_s`, of equal length."""

    begin_s: float
    end_s: float

    def means(self, values: Sequence[tuple[float, float]]) -> list[float]:
        """Returns the mean of the values in each part. A part without values has the mean of all."""
        length_s = max(self.end_s - self.begin_s, _EPSILON) / NUM_PARTS
        parts: list[list[float]] = [[] for _ in range(NUM_PARTS)]
        for at_s, value in values:
            parts[min(int((at_s - self.begin_s) / length_s), NUM_PARTS - 1)].append(value)
        everything = [value for _, value in values]
        return [_mean(part or everything) for part in parts]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _tokens_per_busy_s(prefill: Mapping[str, Sequence[PrefillSample]]) -> float | None:
    """Returns how many tokens a prefill service computes in a second of computing, on average over all of them."""
    num_tokens, busy_s = 0, 0.0
    for samples in prefill.values():
        for before, after in itertools.pairwise(samples):
            if before.num_computed_tokens is None or after.num_computed_tokens is None:
                continue
            num_tokens += max(0, after.num_computed_tokens - before.num_computed_tokens)
            busy_s += (after.at_s - before.at_s) * (before.is_computing + after.is_computing) / 2
    return num_tokens / busy_s if num_tokens and busy_s > 0 else None


def _prefill_demand(sample: PrefillSample, rate: float | None, window_s: float) -> float:
    backlog_s = sample.num_uncomputed_tokens / rate if rate else 0.0
    return float(sample.is_computing) + backlog_s / window_s


def _decode_demand(sample: DecodeSample) -> float:
    """Returns the demand, in services. Queued requests count only for the share of held rows that running requests
    hold: where rows wait for a prefill service, more decode services would not help.
    """
    num_held = sample.num_running + sample.num_arriving
    waits_for_decode = sample.num_queued * (sample.num_running / num_held if num_held else 0.0)
    return sample.running_share + waits_for_decode / max(1, sample.num_rows)


def _need(now: int, services: Sequence[Sequence[float]], *, is_held: bool) -> Need:
    """Returns how many services of one kind the load needs. `services` has each one's demand in each part of the time
    looked at, and `now` is their number. With `is_held`, because advice is held back, `wanted` is None.
    """
    demands = [sum(part) for part in zip(*services, strict=True)]
    mean, peak = _mean(demands), max(demands, default=0.0)
    least = max(1, math.ceil(mean / HIGH - _EPSILON))
    most = max(least, math.ceil(peak / LOW - _EPSILON))
    wanted = None if is_held else min(max(now, least), most)
    return Need(now=now, wanted=wanted, mean=round(mean, 3), peak=round(peak, 3))


def _why_hold(
    prefill: Mapping[str, Sequence[PrefillSample]],
    decode: Mapping[str, Sequence[DecodeSample]],
    missing: Sequence[str],
) -> str:
    if missing:
        return "not every service answered all the time"
    for address in sorted(prefill.keys() & decode.keys()):
        return f"{address} changed its role within the window"
    services: dict[str, Sequence[PrefillSample | DecodeSample]] = {**prefill, **decode}
    for address, samples in services.items():
        if len({each.instance_id for each in samples}) > 1:
            return f"{address} began anew within the window"
        if not all(each.is_settled for each in samples):
            return f"{address} was not ready or changed its role within the window"
        if len(samples) < MIN_SAMPLES:
            return f"{address} gave {len(samples)} samples, and {MIN_SAMPLES} are needed"
    return ""


def _switches(needs: Mapping[Role, Need], loads: Mapping[Role, Mapping[str, float]]) -> dict[str, Role]:
    """Returns the services that should change their role: those with the least load of the kind that has too many."""
    for short, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
        num = min(needs[short].num_more, -needs[other].num_more)
        if num > 0:
            idle_first = sorted(loads[other], key=lambda address: loads[other][address])
            return dict.fromkeys(idle_first[:num], short)
    return {}


@dataclass(slots=True)
class LoadSamples:
    """The samples of services within a window, by the service's address. `missing` says which answers are missing."""

    prefill: dict[str, list[PrefillSample]] = field(default_factory=dict)
    decode: dict[str, list[DecodeSample]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Seen:
    """One answer of a service: its load, and whether it was ready and not about to change its role."""

    load: PrefillLoad | InferenceLoad
    is_settled: bool


def _look(client: RoleClient) -> _Seen | BatonError:
    try:
        state = client.state()
        return _Seen(client.load(state.role), state.is_ready and state.changing_to is None)
    except BatonError as error:
        return error


def sample_loads(
    addresses: Sequence[str],
    *,
    window_s: float,
    interval_s: float,
    tls: Tls | None = None,
    token: str | None = None,
    other_token: str | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> LoadSamples:
    """Asks all services every `interval_s` for `window_s`, and returns what they said.

    `other_token` is shown to the services that refuse `token`. If answers of a service are missing, `missing` has its
    last error. A service that did not answer the last time counts as gone, and has no samples. One that is there by
    two addresses counts once.
    """
    samples = LoadSamples()
    errors: dict[str, list[BatonError]] = {address: [] for address in addresses}
    with ExitStack() as stack, ThreadPoolExecutor(len(addresses)) as threads:
        services = [
            stack.enter_context(
                RoleClient(address, tls=tls, token=token, other_token=other_token, timeout_s=CALL_TIMEOUT_S)
            )
            for address in addresses
        ]
        end_s, num_looks = clock() + window_s, 0
        while True:
            begin_s, gone = clock(), []
            for service, seen in zip(services, threads.map(_look, services), strict=True):
                if isinstance(seen, BatonError):
                    errors[service.address].append(seen)
                    gone.append(service.address)
                elif isinstance(seen.load, PrefillLoad):
                    sample = _prefill_sample(begin_s, seen.load, seen.is_settled)
                    samples.prefill.setdefault(service.address, []).append(sample)
                else:
                    samples.decode.setdefault(service.address, []).append(
                        _decode_sample(begin_s, seen.load, seen.is_settled)
                    )
            num_looks += 1
            if begin_s + interval_s > end_s:
                break
            sleep(max(0.0, begin_s + interval_s - clock()))
    for address in gone:
        samples.prefill.pop(address, None)
        samples.decode.pop(address, None)
    first: dict[str, str] = {}
    seen_at: dict[str, Sequence[PrefillSample | DecodeSample]] = {**samples.prefill, **samples.decode}
    for address, seen_there in seen_at.items():
        if first.setdefault(seen_there[-1].instance_id, address) != address:
            samples.prefill.pop(address, None)
            samples.decode.pop(address, None)
    samples.missing += [
        f"{len(failed)} of {num_looks} answers of {address}: {failed[-1]}"
        for address, failed in errors.items()
        if failed
    ]
    return samples


def _prefill_sample(at_s: float, load: PrefillLoad, is_settled: bool) -> PrefillSample:
    return PrefillSample(
        at_s=at_s,
        instance_id=load.instance_id,
        is_settled=is_settled,
        is_computing=load.num_computing > 0,
        num_uncomputed_tokens=load.num_uncomputed_tokens,
        num_computed_tokens=load.num_computed_tokens,
    )


def _decode_sample(at_s: float, load: InferenceLoad, is_settled: bool) -> DecodeSample:
    shares = (pool.running / pool.total for pool in (load.rows, load.slots) if pool.total)
    return DecodeSample(
        at_s=at_s,
        instance_id=load.instance_id,
        is_settled=is_settled,
        running_share=max(shares, default=0.0),
        num_running=load.rows.running,
        num_arriving=load.rows.reserved + load.rows.transferring,
        num_queued=load.num_queued,
        num_rows=load.rows.total,
    )
