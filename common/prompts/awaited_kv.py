"""Decides whether a prompt waits for KV that another prompt is about to bring into the prefix cache."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from common.kv.pool import CacheKey, KvPool

_WORTH_WAITING = 0.25
"""A prompt waits for another one only if that one brings KV of at least this share of the waiting prompt's tokens."""


class KvSource(Protocol):
    """A prompt that holds a row of the pool, into which its KV is on its way."""

    @property
    def cache_key(self) -> CacheKey | None:
        """The prompt's tokens and its namespace in the prefix cache, or None if it uses no cache."""

    @property
    def num_kept_tokens(self) -> int:
        """How many of the prompt's first tokens have their KV in the prefix cache: it was found there, or put there."""

    @property
    def brings_kv(self) -> bool:
        """Whether the prompt's KV is on its way. False if all of it has come, or the prompt failed or waits again."""

    @property
    def brings_it_in_chunks(self) -> bool:
        """Whether the prompt's KV enters the cache in chunks, from the first tokens on, and not all at the end."""


SourceT = TypeVar("SourceT", bound=KvSource)


@dataclass(frozen=True, slots=True)
class AwaitedKv(Generic[SourceT]):
    """KV that a prompt waits for: that of its first `num_tokens` tokens, which `source` brings to the prefix cache."""

    source: SourceT
    num_tokens: int

    @property
    def is_over(self) -> bool:
        """Whether the awaited KV is in the prefix cache, or will not come. Takes O(1)."""
        return not self.source.brings_kv or self.source.num_kept_tokens >= self.num_tokens


def awaited_kv(
    pool: KvPool, key: CacheKey | None, sources: Iterable[SourceT], *, is_received: bool = False
) -> AwaitedKv[SourceT] | None:
    """Returns the KV that a prompt with `key` should wait for before it gets a row, or None if it should not wait.

    It waits for the source that brings the most KV that the cache lacks now, if that is the KV of at least a quarter of
    the prompt's tokens; if several bring as much, for the first of them. A source whose common KV is in the cache
    already is not waited for. Some sources put all their KV into the cache at their end. Such a source is waited for
    only if the KV that this prompt saves is at least as much as the source's KV that it cannot use. All `sources` must
    hold a row. A waiting prompt holds none, so no two prompts wait for each other. `is_received` is that of
    `KvPool.reserve`.
    """
    if key is None:
        return None
    num_known = pool.num_cached(key, is_received=is_received)
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
