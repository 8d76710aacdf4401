"""Asks services for their role and their load, again and again for a while, as the planner needs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

from baton.client import Client, PrefillClient, Tls
from baton.errors import BatonError
from baton.planner import DecodeSample, PrefillSample
from baton.roles import Role, RoleClient
from baton.server_info import InferenceLoad, PrefillLoad

CALL_TIMEOUT_S = 2.0


@dataclass(slots=True)
class LoadSamples:
    """What services reported within a window: their samples by address, and what could not be asked."""

    prefill: dict[str, list[PrefillSample]] = field(default_factory=dict)
    decode: dict[str, list[DecodeSample]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


class _Service:
    """The clients of one service, whichever kind it is."""

    def __init__(self, address: str, tls: Tls | None, token: str | None, stack: ExitStack) -> None:
        self.address = address
        self._roles = stack.enter_context(RoleClient(address, tls=tls, token=token, timeout_s=CALL_TIMEOUT_S))
        self._prefill = stack.enter_context(PrefillClient(address, tls=tls, token=token, rpc_timeout_s=CALL_TIMEOUT_S))
        self._decode = stack.enter_context(Client(address, tls=tls, token=token, rpc_timeout_s=CALL_TIMEOUT_S))

    def look(self) -> PrefillLoad | InferenceLoad | BatonError:
        try:
            if self._roles.state().role is Role.PREFILL:
                return self._prefill.load()
            return self._decode.load()
        except BatonError as error:
            return error


def sample_loads(
    addresses: Sequence[str],
    *,
    window_s: float,
    interval_s: float,
    tls: Tls | None = None,
    token: str | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> LoadSamples:
    """Asks all services every `interval_s` for `window_s`, and returns what they said.

    A service that did not answer once has no samples; `missing` has its last error. So it has if some answers of a
    service are missing.
    """
    samples = LoadSamples()
    errors: dict[str, list[BatonError]] = {address: [] for address in addresses}
    with ExitStack() as stack, ThreadPoolExecutor(len(addresses)) as threads:
        services = [_Service(address, tls, token, stack) for address in addresses]
        end_s, num_looks = clock() + window_s, 0
        while True:
            begin_s = clock()
            for service, seen in zip(services, threads.map(_Service.look, services), strict=True):
                if isinstance(seen, BatonError):
                    errors[service.address].append(seen)
                elif isinstance(seen, PrefillLoad):
                    samples.prefill.setdefault(service.address, []).append(_prefill_sample(begin_s, seen))
                else:
                    samples.decode.setdefault(service.address, []).append(_decode_sample(begin_s, seen))
            num_looks += 1
            if begin_s + interval_s > end_s:
                break
            sleep(max(0.0, begin_s + interval_s - clock()))
    samples.missing += [
        f"{len(failed)} of {num_looks} answers of {address}: {failed[-1]}"
        for address, failed in errors.items()
        if failed
    ]
    return samples


def _prefill_sample(at_s: float, load: PrefillLoad) -> PrefillSample:
    return PrefillSample(
        at_s=at_s,
        instance_id=load.instance_id,
        is_computing=bool(load.num_computing or load.num_queued or load.num_uncomputed_tokens),
        num_uncomputed_tokens=load.num_uncomputed_tokens,
        num_admitted_tokens=load.num_admitted_tokens,
    )


def _decode_sample(at_s: float, load: InferenceLoad) -> DecodeSample:
    shares = (pool.running / pool.total for pool in (load.rows, load.slots) if pool.total)
    return DecodeSample(
        at_s=at_s,
        instance_id=load.instance_id,
        running_share=max(shares, default=0.0),
        num_running=load.rows.running,
        num_arriving=load.rows.reserved + load.rows.transferring,
        num_queued=load.num_queued,
        num_rows=load.rows.total,
    )
