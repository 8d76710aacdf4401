"""KV that a waiting prompt need not get for itself, because another prompt brings it to the prefix cache now."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from common.kv.pool import CacheKey, KvPool

_WORTH_WAITING = 0.25
"""The share of a prompt's tokens that another prompt must bring for it, so that the prompt waits for that."""


class KvSource(Protocol):
    """A prompt whose KV is on its way to the pool, into a row that it holds."""

    @property
    def cache_key(self) -> CacheKey | None:
        """Its tokens and its namespace in the prefix cache, or None if it uses no cache."""

    @property
    def num_kept_tokens(self) -> int:
        """How many of its first tokens have their KV in the prefix cache: found there, or left there."""

    @property
    def brings_kv(self) -> bool:
        """Whether its KV is still on its way. False once all of it is there, and if it has failed or waits again."""

    @property
    def brings_it_in_chunks(self) -> bool:
        """Whether its first tokens' KV is in the cache before that of its last ones."""


@dataclass(frozen=True, slots=True)
class AwaitedKv:
    """The KV of a prompt's first `num_tokens` tokens, which `source` brings."""

    source: KvSource
    num_tokens: int

    @property
    def is_over(self) -> bool:
        """Whether the KV is in the prefix cache, or will not come. Takes O(1)."""
        return not self.source.brings_kv or self.source.num_kept_tokens >= self.num_tokens


def awaited_kv(pool: KvPool, key: CacheKey | None, sources: Iterable[KvSource]) -> AwaitedKv | None:
    """Returns the KV that a prompt with `key` should wait for before it gets a row, or None if it should not wait.

    It waits for the source that brings most of what the cache lacks now, if that is a quarter of the prompt's tokens;
    of several that bring as much, for the first. A source brings nothing of what it has in the cache already. Of one
    that leaves everything at its end, what is not for this prompt must be no more than what is. To wait holds nothing,
    so a prompt must wait only for `sources` that hold a row: then no two wait for each other.
    """
    if key is None:
        return None
    num_known = pool.num_cached(key)
    best, num_wanted = None, num_known + math.ceil(len(key.token_ids) * _WORTH_WAITING)
    for source in sources:
        if (other := source.cache_key) is None:
            continue
        num_usable = pool.num_common(key, other, at_least=num_wanted)
        if num_usable <= source.num_kept_tokens:  # nothing in common, or its KV was forgotten
            continue
        num_saved, num_not_shared = num_usable - num_known, len(other.token_ids) - num_usable
        if source.brings_it_in_chunks or num_not_shared <= num_saved:
            best, num_wanted = AwaitedKv(source, num_usable), num_usable + 1
    return best
