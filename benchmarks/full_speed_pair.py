"""Starts a pair and waits until it runs at full speed, with fused forwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from baton.full_speed import await_fused
from baton.local_pair import LocalPair
from common.config.fast_paths import FastPath

NO_PREFIX_CACHE = f"--disabled-fast-paths={FastPath.PREFIX_CACHE}"
BY_OPERATORS = f"--disabled-fast-paths={FastPath.FUSED_FORWARDS}"
_FULL_SPEED_TIMEOUT_S = 300.0


@contextmanager
def full_speed_pair(
    *,
    fuses: bool = True,
    fuses_prompts: bool = True,
    reuses_prefixes: bool = False,
    hands_all_over: bool = True,
    prefill_args: Sequence[str] = (),
    decode_args: Sequence[str] = (),
    **options: Any,
) -> Iterator[LocalPair]:
    """Runs a LocalPair with these options, and yields it once its services have fused their forwards.

    With `fuses_prompts=False` only the decode services are waited for. With `fuses=False` no service fuses its
    forwards, and none is waited for. Without `reuses_prefixes` the services cache no KV, because many benchmarks send
    the same prompts again. With `hands_all_over` short prompts are handed over too, unless `decode_args` say otherwise.
    Raises TimeoutError.
    """
    if not fuses:
        prefill_args, decode_args = ((*args, BY_OPERATORS) for args in (prefill_args, decode_args))
    cache = () if reuses_prefixes else (NO_PREFIX_CACHE,)
    hands = ("--local-prefill-tokens=0",) if hands_all_over else ()
    with LocalPair(
        prefill_args=(*prefill_args, *cache),
        decode_args=(*hands, *decode_args, *cache),
        exposes_metrics=True,
        **options,
    ) as pair:
        if fuses:
            print("waiting for fused forwards", file=sys.stderr)
            wait_full_speed(pair.metrics_addresses[0 if fuses_prompts else len(pair.prefill_addresses) :])
        yield pair


def wait_full_speed(metrics_addresses: Sequence[str]) -> None:
    """Waits until all services with these metrics pages have fused their forwards. Raises TimeoutError."""
    if not await_fused(metrics_addresses, timeout_s=_FULL_SPEED_TIMEOUT_S):
        raise TimeoutError(f"forwards were not fused within {_FULL_SPEED_TIMEOUT_S} s")
