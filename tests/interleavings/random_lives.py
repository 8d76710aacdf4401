"""Random lives (scenarios of a decode engine): the number of requests, their lengths and endings, and what runs
short.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from decode_service.speculate.spec_info import SpecInfo
from tests.engine.speculating import CHAIN, TREE
from tests.interleavings.explored_device import ExploredDevice
from tests.interleavings.scenarios import (
    BOOTSTRAPPED_BEFORE_DRAFT_EXTEND,
    LAUNCHED_BEFORE_DRAFT_EXTEND,
    RETRACTED,
    RETRIED,
    ExploredEngine,
    Scenario,
)

NAMES = "abcd"
ENDINGS = ("abort", "stop", "lost")
PREFIX = "random_life-"
"""Prefix of a random life's name; its seed follows."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a life. `ending` is one of ENDINGS ("lost" loses its first handoff), or None if the request decodes
    to its end.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    ending: str | None
    after_tokens: int

    @classmethod
    def draw(cls, numbers: random.Random) -> Request:
        return cls(
            prompt=tuple(numbers.randint(1, 900) for _ in range(numbers.randint(1, 4))),
            max_tokens=numbers.randint(1, 7),
            ending=numbers.choice([None, None, *ENDINGS]),
            after_tokens=numbers.randint(0, 3),
        )


@dataclass(frozen=True, slots=True)
class Life:
    """The requests of a life and the engine's sizes. `spare_slots` are slots beyond those that the longest request
    needs alone.
    """

    requests: tuple[Request, ...]
    max_rows: int
    spec_info: SpecInfo | None
    spare_slots: int
    overlap: bool
    lags: bool

    @classmethod
    def draw(cls, numbers: random.Random) -> Life:
        return cls(
            requests=tuple(Request.draw(numbers) for _ in range(numbers.randint(2, len(NAMES)))),
            max_rows=numbers.randint(1, 3),
            spec_info=numbers.choice([None, None, CHAIN, TREE]),
            spare_slots=numbers.randint(0, numbers.choice([6, 40])),
            overlap=numbers.choice([True, True, False]),
            lags=numbers.choice([True, False]),
        )

    def program(self, device: ExploredDevice) -> None:
        """Run the life on the device, as a Program (explorer.py)."""
        num_needed = max(len(each.prompt) + each.max_tokens for each in self.requests)
        num_ahead = 0 if self.spec_info is None else self.spec_info.num_slots - 1
        Scenario(
            self._body,
            self.max_rows,
            num_needed + num_ahead + self.spare_slots,
            self.spec_info,
            overlap=self.overlap,
            lags=self.lags,
            headroom_tokens=1,
        ).program(device)

    def _body(self, engine: ExploredEngine) -> None:
        for name, each in zip(NAMES, self.requests, strict=False):
            engine.submit(name, each.prompt, each.max_tokens)
            if each.ending == "abort":
                engine.abort_some_time(name, after_tokens=each.after_tokens)
            elif each.ending == "stop":
                engine.stop_some_time(name)
            elif each.ending == "lost":
                engine.lose_handoff_once(name)


@dataclass(frozen=True, slots=True)
class RandomLife:
    """The scenario of the life that `seed` draws. Its name contains the seed, so the name alone recreates it."""

    seed: str

    @property
    def life(self) -> Life:
        return Life.draw(random.Random(self.seed))

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.seed}"

    def program(self, device: ExploredDevice) -> None:
        """Run the life on the device, as a Program (explorer.py)."""
        self.life.program(device)


@dataclass(frozen=True, slots=True)
class RandomLives:
    """All random lives together; one order of each is run. Among every `num_telling` of them, some must show each thing
    in `some_have`.
    """

    name: str = "random_lives"
    num_telling: int = 2000
    some_have: frozenset[str] = frozenset(
        {RETRIED, RETRACTED, LAUNCHED_BEFORE_DRAFT_EXTEND, BOOTSTRAPPED_BEFORE_DRAFT_EXTEND}
    )
