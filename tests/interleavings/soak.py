"""Runs orders until enough different ones were run: all orders of the small scenarios, and random orders of the large
scenarios and of random lives.

    python -m tests.interleavings.soak --interleavings 100000 [--minutes M] [--processes P] [--seed S]

Orders without an observable difference count once. Of the time that the small scenarios leave, four fifths go to random
lives, and the large scenarios share the rest equally. The soak ends with status 1 at the first failure, which it prints
as a script to replay, or if the minutes are over before enough orders were run.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context

import torch

from tests.interleavings.catalogue import EXHAUSTIVE, LARGE, AnyScenario
from tests.interleavings.explorer import Failure, explore, random_order, shorten
from tests.interleavings.random_lives import RandomLife, RandomLives

_RUNS_A_SPELL = 40
_PROGRESS_S = 30.0
_FEW_NEW = 0.02
_LIVES_SHARE = 4
"""Time for random lives, relative to the time for all other large scenarios together."""

Explored = AnyScenario | RandomLives


@dataclass(frozen=True, slots=True)
class Spell:
    """The result of one worker's batch of orders of a scenario: some random ones, or all there are. `failure` is text,
    since exceptions do not travel between processes.
    """

    num_runs: int
    digests: frozenset[int]
    seconds: float
    num_known: int = 0
    is_exhaustive: bool = False
    failure: str = ""
    witnessed: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Tally:
    """Totals of a scenario so far. `is_used_up` says that hardly any of its random orders is new any more."""

    num_spells: int = 0
    num_runs: int = 0
    seconds: float = 0.0
    digests: set[int] = field(default_factory=set)
    num_known: int = 0
    is_exhaustive: bool = False
    is_used_up: bool = False
    failure: str = ""
    witnessed: Counter[str] = field(default_factory=Counter)

    @property
    def num_interleavings(self) -> int:
        return self.num_known + len(self.digests)

    def add(self, spell: Spell) -> None:
        before = self.num_interleavings
        self.num_runs += spell.num_runs
        self.seconds += spell.seconds
        self.digests |= spell.digests
        self.num_known += spell.num_known
        self.is_exhaustive = spell.is_exhaustive
        self.is_used_up = spell.is_exhaustive or self.num_interleavings - before < _FEW_NEW * spell.num_runs
        self.failure = self.failure or spell.failure
        self.witnessed += spell.witnessed


def run_all(scenario: AnyScenario) -> Spell:
    began_s = time.monotonic()
    report = explore(scenario.program)
    num_known = report.num_interleavings
    told = "" if report.failure is None else _tell(scenario, report.failure)
    if not told and num_known != EXHAUSTIVE.get(scenario, num_known):
        told = f"{scenario.name}: {num_known} orders, and {EXHAUSTIVE[scenario]} are known"
    return Spell(num_known, frozenset(), time.monotonic() - began_s, num_known, report.is_exhaustive, told)


def run_some(explored: Explored, seed: str) -> Spell:
    began_s = time.monotonic()
    digests: set[int] = set()
    witnessed: Counter[str] = Counter()
    for number in range(_RUNS_A_SPELL):
        scenario = RandomLife(f"{seed}/{number}") if isinstance(explored, RandomLives) else explored
        order = random_order(scenario.program, f"{seed}/{number}")
        digests.add(order.digest)
        witnessed.update(order.witnessed)
        if order.error is not None:
            told = _tell(scenario, Failure(order.script, order.error, len(digests)))
            return Spell(number + 1, frozenset(digests), time.monotonic() - began_s, failure=told)
    return Spell(_RUNS_A_SPELL, frozenset(digests), time.monotonic() - began_s, witnessed=witnessed)


def _tell(scenario: AnyScenario, failure: Failure) -> str:
    short = shorten(scenario.program, failure)
    return (
        f"{scenario.name}: {short.error}\nreplay: python -m tests.interleavings.replay {scenario.name} '{short.script}'"
    )


class Soak:
    """Runs spells (batches of orders) until `num_wanted` different orders were run, `minutes` are over, or no scenario
    has new orders.
    """

    def __init__(
        self,
        *,
        small: Sequence[AnyScenario],
        large: Sequence[Explored],
        num_wanted: int,
        minutes: float = math.inf,
        seed: int = 0,
    ) -> None:
        self._small = list(small)
        self._num_wanted = num_wanted
        self._seed = seed
        self._began_s = time.monotonic()
        self._ends_s = self._began_s + 60 * minutes
        self._large = {scenario: Tally() for scenario in large}
        self.tallies: dict[Explored, Tally] = {**{scenario: Tally() for scenario in small}, **self._large}

    @property
    def num_interleavings(self) -> int:
        return sum(tally.num_interleavings for tally in self.tallies.values())

    @property
    def failures(self) -> list[str]:
        return [tally.failure for tally in self.tallies.values() if tally.failure]

    @property
    def shortcomings(self) -> list[str]:
        """The reasons to fail at the end: failures, random lives that never showed something, or fewer orders than
        wanted. Empty if all is well.
        """
        if self.failures:
            return self.failures
        shortcomings = [
            f"{explored.name}: in none {missing}"
            for explored, tally in self.tallies.items()
            if isinstance(explored, RandomLives) and tally.num_runs >= explored.num_telling
            for missing in sorted(explored.some_have - tally.witnessed.keys())
        ]
        if not self.is_reached:
            shortcomings.append(
                f"{self.num_interleavings} interleavings of {self._num_wanted}: time, or orders, were short"
            )
        return shortcomings

    @property
    def is_reached(self) -> bool:
        return self.num_interleavings >= self._num_wanted and all(
            tally.is_exhaustive for scenario, tally in self.tallies.items() if scenario not in self._large
        )

    def run(self, executor: Executor, *, num_at_once: int) -> None:
        running: dict[Future[Spell], Explored] = {}
        told_s = self._began_s
        while True:
            while len(running) < num_at_once and (begun := self._begin(executor, set(running.values()))):
                running[begun[0]] = begun[1]
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                self.tallies[running.pop(future)].add(future.result())
            if time.monotonic() - told_s >= _PROGRESS_S:
                told_s = time.monotonic()
                print(f"{told_s - self._began_s:6.0f} s: {self.num_interleavings} interleavings", flush=True)

    def _begin(self, executor: Executor, running: set[Explored]) -> tuple[Future[Spell], Explored] | None:
        if self.failures or self.is_reached or time.monotonic() >= self._ends_s:
            return None
        if self._small:
            scenario = self._small.pop(0)
            return executor.submit(run_all, scenario), scenario
        left = [
            each
            for each, tally in self._large.items()
            if not tally.is_used_up and (each not in running or isinstance(each, RandomLives))
        ]
        if not left:
            return None
        scenario = min(left, key=self._time_had)
        tally = self._large[scenario]
        tally.num_spells += 1
        return executor.submit(run_some, scenario, f"{self._seed}/{tally.num_spells}"), scenario

    def _time_had(self, explored: Explored) -> float:
        share = _LIVES_SHARE * (len(self._large) - 1) if isinstance(explored, RandomLives) else 1
        return self._large[explored].seconds / max(1, share)

    def table(self) -> str:
        lines = ["| scenario | runs | interleavings | all of them | seconds | result |", "|---|---|---|---|---|---|"]
        for scenario, tally in self.tallies.items():
            is_all, result = "yes" if tally.is_exhaustive else "no", "FAILED" if tally.failure else "clean"
            if not tally.num_runs:
                result = "not run"
            lines.append(
                f"| {scenario.name} | {tally.num_runs} | {tally.num_interleavings} | {is_all} "
                f"| {tally.seconds:.0f} | {result} |"
            )
        num_runs = sum(tally.num_runs for tally in self.tallies.values())
        lines.append(
            f"| together | {num_runs} | {self.num_interleavings} | | {time.monotonic() - self._began_s:.0f} | |"
        )
        witnessed = sum((tally.witnessed for tally in self.tallies.values()), Counter[str]())
        lines += ["", *(f"{count} x {what}" for what, count in sorted(witnessed.items()))]
        return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interleavings", type=int, default=100_000, help="different orders that are wanted")
    parser.add_argument("--minutes", type=float, default=math.inf, help="when to give up")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="another one, other random orders")
    options = parser.parse_args(arguments)
    soak = Soak(
        small=tuple(EXHAUSTIVE),
        large=(*LARGE, RandomLives()),
        num_wanted=options.interleavings,
        minutes=options.minutes,
        seed=options.seed,
    )
    with ProcessPoolExecutor(
        options.processes, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as executor:
        soak.run(executor, num_at_once=options.processes)
    print(soak.table())
    for shortcoming in soak.shortcomings:
        print(f"FAILED {shortcoming}")
    return 1 if soak.shortcomings else 0


if __name__ == "__main__":
    sys.exit(main())
