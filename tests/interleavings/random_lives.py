"""Random lives (scenarios of a decode engine): the number of requests, their prompts and endings, which of them
share KV, who computes their prompts, and what runs short.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from common.kv.window_slots import row_slots
from common.sampling.params import ResolvedSampling
from decode_service.schedule.config import DecodeConfig
from decode_service.speculate.spec_info import NO_DRAFTS, SpecInfo
from tests.engine.speculating import CHAIN, TREE
from tests.engine.tags import TAG_GRAMMAR, WINDOW, oracle
from tests.interleavings.explored_device import ExploredDevice
from tests.interleavings.scenarios import (
    BOOTSTRAPPED_BEFORE_DRAFT_EXTEND,
    COMPUTED_HERE,
    EVICTED,
    FALLBACK_CHUNK_TOKENS,
    LAUNCHED_BEFORE_DRAFT_EXTEND,
    LAUNCHED_BESIDE_A_CHUNK,
    NOT_READY,
    READY,
    RETRACTED,
    RETRIED,
    REUSED,
    ExploredEngine,
    Scenario,
)

NAMES = "abcd"
ENDINGS = ("abort", "stop", "lost")
BEGINNINGS = ((1, 2, 3, 4, 5), (1, 2, 3), (1, 2, 9, 8), (1, 2, 9), (6,))
"""The first tokens of prompts. They are few, and some share only a part, so prompts split each other's cached
prefixes.
"""

SALTS = ("", "", "a", None)
REPLICAS = ("stays", "stays", "stays", "leaves", "returns", "comes late")
"""What the prefill replica may do; each life draws one of these. While there is no replica, the decode service computes
prompts itself.
"""

PREFIX = "random_life-"
"""Prefix of a random life's name; its seed follows."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a life. `ending` is one of ENDINGS ("lost" loses its first handoff), or None if the request decodes
    to its end. A request that `goes_on` comes after the end of the request before it; its prompt is that request's
    prompt and output, followed by `prompt`. If it `is_constrained`, a grammar constrains its output.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    ending: str | None
    after_tokens: int
    cache_salt: str | None
    goes_on: bool
    is_constrained: bool

    @classmethod
    def draw(cls, numbers: random.Random) -> Request:
        own = tuple(numbers.randint(1, 900) for _ in range(numbers.randint(0, 2)))
        return cls(
            prompt=numbers.choice(BEGINNINGS) + own,
            max_tokens=numbers.randint(1, 7),
            ending=numbers.choice([None, None, *ENDINGS]),
            after_tokens=numbers.randint(0, 3),
            cache_salt=numbers.choice(SALTS),
            goes_on=numbers.random() < 0.3,
            is_constrained=False,
        )


@dataclass(frozen=True, slots=True)
class Life:
    """The requests of a life and the engine's sizes. `spare_slots` are slots beyond those that the longest request
    needs when it runs alone. `replica` is one of REPLICAS. If `spare_window_slots` is a number, the model has layers
    with a window, and that many slots for them beyond those that one row needs.
    """

    requests: tuple[Request, ...]
    max_rows: int
    spec_info: SpecInfo | None
    spare_slots: int
    overlap: bool
    lags: bool
    local_prefill_tokens: int
    replica: str
    spare_window_slots: int | None

    @classmethod
    def draw(cls, numbers: random.Random) -> Life:
        life = cls(
            requests=tuple(Request.draw(numbers) for _ in range(numbers.randint(2, len(NAMES)))),
            max_rows=numbers.randint(1, 3),
            spec_info=numbers.choice([None, None, CHAIN, TREE]),
            spare_slots=numbers.randint(0, numbers.choice([6, 40])),
            overlap=numbers.choice([True, True, False]),
            lags=numbers.choice([True, False]),
            local_prefill_tokens=numbers.choice([0, 0, 2, 4]),
            replica=numbers.choice(REPLICAS),
            spare_window_slots=None,
        )
        return replace(
            life,
            requests=tuple(replace(each, is_constrained=numbers.random() < 0.25) for each in life.requests),
            spare_window_slots=numbers.choice([None, None, 0, 6]),
        )

    def prompts(self) -> list[tuple[int, ...]]:
        prompts: list[tuple[int, ...]] = []
        said: tuple[int, ...] = ()
        for each in self.requests:
            prompts.append((*said, *each.prompt) if each.goes_on else each.prompt)
            greedy = ResolvedSampling(
                seed=0,
                max_tokens=each.max_tokens,
                temperature=0.0,
                grammar=TAG_GRAMMAR if each.is_constrained else None,
            )
            said = (*prompts[-1], *oracle(prompts[-1], each.max_tokens, greedy))
        return prompts

    def program(self, device: ExploredDevice) -> None:
        """Runs the life on the device, as a Program (explorer.py)."""
        prompts = self.prompts()
        num_needed = max(len(prompt) + each.max_tokens for prompt, each in zip(prompts, self.requests, strict=True))
        num_ahead = 0 if self.spec_info is None else self.spec_info.num_slots - 1
        Scenario(
            partial(self._body, prompts),
            self.max_rows,
            num_needed + num_ahead + self.spare_slots,
            self.spec_info,
            overlap=self.overlap,
            lags=self.lags,
            headroom_tokens=1,
            local_prefill_tokens=self.local_prefill_tokens,
            prefill_fallback=self.replica != "stays",
            max_window_tokens=self._max_window_tokens(),
            replicas=NOT_READY if self.replica == "comes late" else READY,
        ).program(device)

    def _max_window_tokens(self) -> int:
        if self.spare_window_slots is None:
            return 0
        config = DecodeConfig(
            spec_info=self.spec_info or NO_DRAFTS,
            local_prefill_tokens=self.local_prefill_tokens,
            prefill_fallback=True,
            fallback_chunk_tokens=FALLBACK_CHUNK_TOKENS,
            left_together=1,
        )
        assert WINDOW.group.window is not None
        num_slots = row_slots(WINDOW.group.window, num_kept_before=1, num_in_flight=config.tokens_in_flight)
        return num_slots + self.spare_window_slots

    def _body(self, prompts: list[tuple[int, ...]], engine: ExploredEngine) -> None:
        if self.replica != "stays":
            engine.lose_replica_some_time(returns=self.replica != "leaves")
        begins = [
            partial(_begin, engine, name, each, prompt)
            for name, each, prompt in zip(NAMES, self.requests, prompts, strict=False)
        ]
        follows = [each.goes_on and place > 0 for place, each in enumerate(self.requests)]
        for place in np.flatnonzero(follows).tolist():
            engine.follow(NAMES[place - 1], begins[place])
        for place in np.flatnonzero(np.logical_not(follows)).tolist():
            begins[place]()


def _begin(engine: ExploredEngine, name: str, each: Request, prompt: tuple[int, ...]) -> None:
    engine.submit(name, prompt, each.max_tokens, cache_salt=each.cache_salt, is_constrained=each.is_constrained)
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
        """Runs the life on the device, as a Program (explorer.py)."""
        self.life.program(device)


@dataclass(frozen=True, slots=True)
class RandomLives:
    """All random lives together. Each order that is run is of another life. Once `num_telling` orders were run, at
    least one of them must have shown each thing in `some_have`.
    """

    name: str = "random_lives"
    num_telling: int = 2000
    some_have: frozenset[str] = frozenset(
        {
            RETRIED,
            RETRACTED,
            REUSED,
            EVICTED,
            COMPUTED_HERE,
            LAUNCHED_BESIDE_A_CHUNK,
            LAUNCHED_BEFORE_DRAFT_EXTEND,
            BOOTSTRAPPED_BEFORE_DRAFT_EXTEND,
        }
    )
