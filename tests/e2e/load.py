"""Requests that keep services busy. Each result is compared with that of a run without disturbances."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from baton import Client, Completion, Delta
from baton.client.generation import CompletionBuilder
from baton.errors import BatonError
from baton.requests import SamplingOptions
from baton.service_process import ServiceProcess
from tests.support.running_pair import BOUND_S, RunningPair, wait_until

LOGPROB_TOLERANCE = 1e-3
PAUSE_AFTER_ERROR_S = 0.05


@dataclass(frozen=True, slots=True)
class Workload:
    """Numbered requests. A number always gives the same request; every other one is greedy, and some ask for
    log-probabilities.
    """

    prompt_tokens: int
    new_tokens: int
    num_kinds: int = 8
    caches: bool | None = None

    def options(self, number: int) -> dict[str, Any]:
        number %= self.num_kinds
        sampling: SamplingOptions = {
            "max_tokens": self.new_tokens,
            "ignore_eos": True,
            "temperature": 0.0 if number % 2 else 0.9,
            "seed": number,
            "logprobs": 1 if number % 3 == 0 else None,
        }
        prompt = [10 + (number * 37 + place * (number + 3)) % 240 for place in range(self.prompt_tokens)]
        return {"token_ids": prompt, "timeout_s": BOUND_S, "cache_prompt": self.caches, **sampling}

    def complete(self, client: Client, number: int) -> Completion:
        return client.complete(**self.options(number))

    @contextmanager
    def at_once(self, client: Client) -> Iterator[list[Future[Completion]]]:
        """Starts a request of each kind, and yields them in the order of their numbers."""
        with ThreadPoolExecutor(self.num_kinds) as threads:
            yield [threads.submit(self.complete, client, number) for number in range(self.num_kinds)]

    def undisturbed(self, client: Client) -> list[Completion]:
        with self.at_once(client) as asked:
            return [each.result() for each in asked]


def tokens(asked: Sequence[Future[Completion]]) -> list[tuple[int, ...]]:
    return [each.result().token_ids for each in asked]


@dataclass(slots=True)
class Outcomes:
    """The results so far of a running load: the times of requests that were served correctly, and the errors of the
    others.
    """

    served_at_s: list[float] = field(default_factory=list)
    served_begun_at_s: list[float] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)
    errors: list[BatonError] = field(default_factory=list)
    num_deltas: int = 0

    @property
    def num_served(self) -> int:
        return len(self.served_at_s)

    def first_served_after(self, start_s: float, *, begun_after: bool = False) -> float:
        """Returns the seconds from `start_s` (monotonic) to the end of the first request that ended after it. With
        `begun_after`, the request must also have begun after it.
        """

        def ends() -> list[float]:
            moments = zip(list(self.served_begun_at_s), list(self.served_at_s), strict=False)
            return [ended for begun, ended in moments if (begun if begun_after else ended) >= start_s]

        wait_until(lambda: bool(ends()), about=lambda: self.errors[-1:])
        return min(ends()) - start_s

    def wait_for_more(self, num: int = 4) -> None:
        """Waits until `num` more requests have been served."""
        wanted = self.num_served + num
        wait_until(lambda: self.num_served >= wanted, about=lambda: (self.num_served, self.errors[-1:]))


@contextmanager
def load(
    client: Client, workload: Workload, expected: Sequence[Completion], *, num_threads: int = 6
) -> Iterator[Outcomes]:
    """Sends requests from `num_threads` threads while the block runs. Each thread sends its next request when its last
    one ends.

    At the end it waits for the requests under way. A request may give what `expected` says or end with a BatonError;
    anything else fails the test.
    """
    outcomes, numbers, stop = Outcomes(), itertools.count(), threading.Event()

    def ask() -> None:
        while not stop.is_set():
            number, begun_s = next(numbers), time.monotonic()
            try:
                completion = follow(client, workload.options(number), outcomes)
            except BatonError as error:
                outcomes.errors.append(error)
                stop.wait(PAUSE_AFTER_ERROR_S)
            else:
                assert_same(completion, expected[number % workload.num_kinds])
                outcomes.served_begun_at_s.append(begun_s)
                outcomes.served_at_s.append(time.monotonic())
            outcomes.durations_s.append(time.monotonic() - begun_s)

    with ThreadPoolExecutor(num_threads) as threads:
        asking: list[Future[None]] = [threads.submit(ask) for _ in range(num_threads)]
        try:
            wait_until(lambda: outcomes.num_deltas > num_threads or any(each.done() for each in asking))
            yield outcomes
        finally:
            stop.set()
    for each in asking:
        each.result()


def has_rows_with(pair: RunningPair, replica: int) -> bool:
    """Returns whether rows are being handed over, some of them by this replica."""
    load = pair.load()
    return load.rows.transferring > 0 and load.prefill_replicas[replica].num_rows > 0


def kill(service: ServiceProcess) -> None:
    service.kill()
    assert service.wait(BOUND_S)


def follow(client: Client, options: dict[str, Any], outcomes: Outcomes) -> Completion:
    builder = CompletionBuilder()
    completion = None
    with client.generate(**options) as events:
        for event in events:
            outcomes.num_deltas += isinstance(event, Delta)
            completion = builder.add(event)
    assert completion is not None
    return completion


def assert_same(completion: Completion, expected: Completion) -> None:
    """Asserts that both completions have the same tokens, text, log-probabilities, ending and counts, whichever service
    answered.
    """
    for name in ("token_ids", "text", "seed", "finish_reason", "matched_stop", "usage"):
        assert getattr(completion, name) == getattr(expected, name), name
    assert [entry.chosen.token_id for entry in completion.logprobs] == [e.chosen.token_id for e in expected.logprobs]
    assert [entry.chosen.logprob for entry in completion.logprobs] == pytest.approx(
        [entry.chosen.logprob for entry in expected.logprobs], abs=LOGPROB_TOLERANCE
    )
