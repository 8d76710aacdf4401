"""Helpers for the checks of a speculating engine: draft depths from a script or at random, and the expected outcome."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.device.stream import Cell
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.forward.worker import OnPublish, Worker, WorkerOutput
from decode_service.speculate.depth import FixedDepth
from decode_service.speculate.spec_info import SpecInfo, Unread
from tests.engine.harness import Outcome

CHAIN = SpecInfo.chain(2)
TREE = SpecInfo(num_steps=2, num_draft_tokens=5, topk=2)
SEED = CHAIN.at_depth(0)
NOTHING = SEED.without_seed()


class ScriptedDepth(FixedDepth):
    """Chooses the draft depth of each step from a list. The last entry is used for all further steps."""

    def __init__(self, spec_infos: Sequence[SpecInfo], *, deepest: SpecInfo) -> None:
        super().__init__(deepest)
        self._left = list(spec_infos)
        self.launches: list[SpecInfo] = []

    def script(self, spec_infos: Sequence[SpecInfo]) -> None:
        """Chooses these depths from now on."""
        self._left = list(spec_infos)

    def choose(self, *, unread: Unread, num_wanted: int, num_forced: NDArray[np.int64]) -> SpecInfo:
        return self._left[0]

    def launched(self, spec_info: SpecInfo) -> None:
        self.launches.append(spec_info)
        if len(self._left) > 1:
            self._left.pop(0)


class _Told(Cell[Tensor]):
    """What a step tells: the content of a cell, changed."""

    def __init__(self, told: Cell[Tensor], change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.get = lambda: change(told.get())  # type: ignore[method-assign]


@contextmanager
def a_step_that_tells(change: Callable[[Tensor], Tensor], *, number: int, of_accepted: bool = False) -> Iterator[None]:
    """Lets the step with this number, of those with drafts, publish its lengths changed, or with `of_accepted` tell how
    many tokens it has accepted.
    """
    forward, numbers = Worker.forward, itertools.count(1)

    def changed(worker: Worker, batch: ForwardBatch, *, on_publish: OnPublish, **rest: Any) -> WorkerOutput:
        is_it = batch.has_drafts and next(numbers) == number

        def publish(lengths: Cell[Tensor]) -> None:
            on_publish(_Told(lengths, change) if is_it and not of_accepted else lengths)

        output = forward(worker, batch, on_publish=publish, **rest)
        return replace(output, accept_lens=_Told(output.accept_lens, change)) if is_it and of_accepted else output

    with mock.patch.object(Worker, "forward", changed):
        yield


def assert_drafted_as_expected(outcome: Outcome, spec_info: SpecInfo = CHAIN) -> None:
    """Asserts that the tokens are right and that each step drafted `spec_info`. The request must not have been
    retracted.
    """
    assert outcome.token_ids == outcome.expected, "tokens were decoded wrongly"
    expected = outcome.expected_drafting(spec_info)
    assert outcome.drafting == expected, f"drafts were not those of the sequence: {outcome.drafting}, not {expected}"


class RandomDepth(FixedDepth):
    """Chooses draft depths at random. A step drafts only if the step before left a seed.

    Phases of steps with any depth alternate with phases of steps without drafts, most of which leave no seed.
    """

    def __init__(self, deepest: SpecInfo, numbers: random.Random) -> None:
        super().__init__(deepest)
        self._deepest = deepest
        self._numbers = numbers
        self._drafts, self._has_seeds = True, True
        self._next = self._draw()

    def choose(self, *, unread: Unread, num_wanted: int, num_forced: NDArray[np.int64]) -> SpecInfo:
        return self._next if self._has_seeds else self._next.at_depth(0)

    def launched(self, spec_info: SpecInfo) -> None:
        self._has_seeds = spec_info.leaves_seed
        if self._numbers.random() < 0.1:
            self._drafts = not self._drafts
        self._next = self._draw()

    def _draw(self) -> SpecInfo:
        if self._drafts:
            return self._deepest.at_depth(self._numbers.randint(0, self._deepest.num_steps))
        seeded = self._deepest.at_depth(0)
        return seeded if self._numbers.random() < 0.1 else seeded.without_seed()
