"""The memory, file descriptors and threads of each service process over time, and whether they stay flat."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields

import psutil

MAX_GROWTH_KIB = 1.0
"""The most KiB by which memory may grow per request, from the second quarter of a soak to its last. Allocators settle
in the first quarter.
"""
MAX_MORE = 2
"""The most by which file descriptors, and threads, may grow in number: some come and go with connections."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Memory, file descriptors and threads of one process at a moment when no request is live."""

    rss_mib: float
    num_fds: int
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> Figures:
        process = psutil.Process(pid)
        with process.oneshot():
            return cls(process.memory_info().rss / 2**20, process.num_fds(), process.num_threads())


@dataclass(frozen=True, slots=True)
class Trend:
    """Medians of the second and of the last quarter of one process's samples, and the number of requests between the
    two.
    """

    before: Figures
    after: Figures
    num_requests: int

    @classmethod
    def of(cls, samples: Sequence[Figures], *, requests_a_sample: int) -> Trend:
        """Returns the trend of at least 4 samples. Between two samples the process served `requests_a_sample`
        requests.
        """
        quarter = len(samples) // 4
        assert quarter > 0, f"{len(samples)} samples have no quarters"
        num_between = len(samples) - 2 * quarter  # from the middle of one quarter to the middle of the other
        return cls(
            _median(samples[quarter : 2 * quarter]), _median(samples[-quarter:]), num_between * requests_a_sample
        )

    @property
    def growth_kib(self) -> float:
        """The growth of memory in KiB per request."""
        return (self.after.rss_mib - self.before.rss_mib) * 1024 / self.num_requests

    @property
    def is_flat(self) -> bool:
        return (
            self.growth_kib <= MAX_GROWTH_KIB
            and self.after.num_fds <= self.before.num_fds + MAX_MORE
            and self.after.num_threads <= self.before.num_threads + MAX_MORE
        )


def _median(samples: Sequence[Figures]) -> Figures:
    return Figures(*(statistics.median(getattr(sample, field.name) for sample in samples) for field in fields(Figures)))
