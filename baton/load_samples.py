"""Asks services for their role and their load, again and again for a while, as the planner needs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

from baton.client import Tls
from baton.errors import BatonError
from baton.planner import DecodeSample, PrefillSample
from baton.roles import RoleClient
from baton.server_info import InferenceLoad, PrefillLoad

CALL_TIMEOUT_S = 2.0


@dataclass(slots=True)
class LoadSamples:
    """The samples of services within a window, by the service's address. `missing` names what could not be asked."""

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
    last error. A service that did not answer the last time counts as gone, and has no samples.
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
