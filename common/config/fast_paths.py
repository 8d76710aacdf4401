"""Optimisations that can be switched off one by one. All are on by default. They change tokens only by rounding."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

from common.config.fields import split_on_commas


class FastPath(StrEnum):
    """An optimisation that the setting `disabled_fast_paths` can switch off. Its `meaning` says what it does, and when
    to switch it off.
    """

    meaning: str

    def __new__(cls, name: str, meaning: str) -> FastPath:
        path = str.__new__(cls, name)
        path._value_ = name
        path.meaning = meaning
        return path

    OVERLAP = (
        "overlap",
        "The next step is scheduled, and the next prompt's forward launched, while a forward runs. "
        "Switch it off to see whether a fault needs two steps at once.",
    )
    PREFIX_CACHE = (
        "prefix_cache",
        "KV of earlier requests stays in the pool, for requests that begin with the same tokens. "
        "Switch it off to measure without it, or where clients must not learn from response times what others sent.",
    )
    PREFIX_ROUTING = (
        "prefix_routing",
        "Decode hands a request to the prefill service that has most of it cached, weighed against load. "
        "Switch it off to measure without it, or where all that counts is that services are equally busy.",
    )
    CUDA_GRAPHS = (
        "cuda_graphs",
        "On CUDA, decode forwards are recorded at start and replayed. "
        "Switch it off for a model that cannot be recorded, or to save the memory that the recordings take.",
    )
    FUSED_FORWARDS = (
        "fused_forwards",
        "On a CPU, one kernel computes a whole forward. "
        "Switch it off to save memory with a mixture of experts: the kernel has a copy of the experts.",
    )
    OPTIMIZED_MODULES = (
        "optimized_modules",
        "Forwards that are not fused run on faster modules in place of the model's own. "
        "Switch it off to compare with transformers.",
    )
    KERNEL_CACHE = (
        "kernel_cache",
        "On a CPU, compiled kernels are kept in the user's cache for the next start. "
        "Switch it off where that cache must not be written.",
    )
    PREFAULTED_POOL = (
        "prefaulted_pool",
        "On a CPU, the KV pool takes its memory from the system once the service serves. "
        "Switch it off where memory that is not needed yet must stay free.",
    )
    KEPT_MEMORY = (
        "kept_memory",
        "Up to 512 MiB of freed memory stay with the process for the next KV segments. "
        "Switch it off where other processes need that memory.",
    )
    FORWARDS_FIRST = (
        "forwards_first",
        "On a CPU with Linux, threads that wake up do not interrupt those that compute a forward. "
        "Switch it off where another program on the same cores must come first.",
    )
    SHORT_SWITCH_INTERVAL = (
        "short_switch_interval",
        "Python hands its lock from thread to thread after 0.5 ms, not after 5 ms. "
        "Switch it off where a profile shows time lost to switching.",
    )
    EARLY_SENDING = (
        "early_sending",
        "Prefill sends the KV of a chunk's first layers while it computes the later ones. "
        "Switch it off to time computing and sending apart.",
    )
    NONTEMPORAL_COPIES = (
        "nontemporal_copies",
        "On a CPU, decode copies large KV into its pool past the CPU's caches. "
        "Switch it off on a CPU whose caches hold weights and KV together.",
    )
    PARALLEL_CONNECTIONS = (
        "parallel_connections",
        "Decode spreads its calls over two connections to each prefill service. "
        "Switch it off where a proxy or a firewall limits connections.",
    )


def _known(name: str) -> FastPath:
    for path in FastPath:
        if path == name:
            return path
    raise ValueError(f"there is no fast path {name!r}, only {', '.join(FastPath)}")


def _fast_paths(value: Any) -> Any:
    names = split_on_commas(value)
    return tuple(dict.fromkeys(map(_known, names))) if isinstance(names, tuple) else names


FastPaths = Annotated[tuple[FastPath, ...], NoDecode, BeforeValidator(_fast_paths)]
