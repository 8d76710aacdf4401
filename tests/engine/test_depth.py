"""The draft depth of a step adapts to the acceptance rate and to the measured times of the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import cycle, repeat
from random import Random

import numpy as np
import pytest

from common.telemetry.stats import SpeculationStats
from decode_service.speculate.depth import AdaptiveDepth, FixedDepth
from decode_service.speculate.spec_info import MAX_UNREAD, SpecInfo, Unread

Seconds = Callable[[int], float]
MEMORY_BOUND: Seconds = lambda num_tokens: 0.02 + 1e-5 * num_tokens  # noqa: E731
COMPUTE_BOUND: Seconds = lambda num_tokens: 0.002 * num_tokens  # noqa: E731
CPU: Seconds = lambda num_tokens: 0.018 + 0.002 * num_tokens  # noqa: E731
HEAD_S = 0.001
HEAD_SHARE = 0.04
"""Lower bound on the head's forward time, as a share of the target's forward time over the same number of tokens."""
NONE = np.zeros(100, np.int64)
EIGHT = Unread(NONE[:8])
NUM_STEPS = 1000
COMPUTE = pytest.param(COMPUTE_BOUND, marks=pytest.mark.thorough)
MANY = pytest.param(32, marks=pytest.mark.thorough)
WARM_UP = 100


class Serving:
    """A simulated machine and draft head, for AdaptiveDepth to adapt to.

    A verification takes `verify_s(tokens)` seconds. Each draft is right with probability `acceptance`. `pace` slows
    everything down for a while, and `seconds` adds up the times without that slowdown. Each row ends after `lifetime`
    steps; the ends are staggered.
    """

    def __init__(
        self,
        verify_s: Seconds,
        acceptance: float,
        *,
        deepest: SpecInfo | None = None,
        lifetime: int = 10**9,
    ) -> None:
        self.depth = AdaptiveDepth(deepest or SpecInfo.chain(4))
        self.reads_drafts = deepest is None or deepest.reads_drafts
        self.verify_s, self.acceptance = verify_s, acceptance
        self.read_s: Seconds = self.head_s
        self.pace = 1.0
        self.lifetime = lifetime
        self.age = 0
        self.numbers = Random(3)
        self.chosen: list[SpecInfo] = []
        self.lags = np.empty(0, np.int64)
        self.num_tokens = 0
        self.seconds = 0.0
        self.seconds_to_begin = 0.0

    def step(self, num_rows: int, *, num_wanted: int | None = None, num_forced: int = 0) -> None:
        """Each row that wants drafts has its first `num_forced` drafts from its grammar."""
        num_wanted = num_rows if num_wanted is None else num_wanted
        are_forced = np.where(np.arange(num_rows) < num_wanted, num_forced, 0)
        self.age += 1
        self.lags = np.pad(self.lags[:num_rows], (0, max(0, num_rows - len(self.lags))))
        self.lags[(self.age + np.arange(num_rows) * 37) % self.lifetime == 0] = 0
        unread = Unread(self.lags)
        for _ in range(3):  # a stalled tick asks for a depth and launches nothing
            spec_info = self.depth.choose(unread=unread, num_wanted=num_wanted, num_forced=are_forced)
        self.depth.launched(spec_info)
        self.chosen.append(spec_info)
        accept_lens = tuple(self._accepted(spec_info.num_steps, num_forced) for _ in range(num_wanted))
        num_tokens = num_rows * spec_info.num_verify_tokens
        are_read = unread.are_read(spec_info)
        num_read = unread.num_read + num_rows * spec_info.num_steps if are_read else 0
        self.lags = np.zeros_like(self.lags) if are_read else self.lags + 1
        skips_head = spec_info.topk == 1 and num_wanted == num_rows and num_forced >= spec_info.num_steps
        stats = SpeculationStats(
            spec_info.num_steps,
            accept_lens,
            draft_s=0.0 if skips_head else self.pace * self.head_s(num_rows) * max(0, spec_info.num_steps - 1),
            verify_s=self.pace * self.verify_s(num_tokens),
            extend_s=self.pace * self.read_s(num_read) if num_read else 0.0,
            num_forced=(min(num_forced, spec_info.num_steps),) * num_wanted,
        )
        self.depth.observe(spec_info, unread=unread, stats=stats)
        self.num_tokens += sum(accept_lens) + num_rows - num_wanted
        self.seconds += (stats.draft_s + stats.verify_s + stats.extend_s) / self.pace
        if spec_info.leaves_seed and not spec_info.num_steps:
            self.seconds_to_begin += stats.extend_s / self.pace

    def run(self, num_rows: int, *, num_wanted: int | None = None, paces: Iterable[float] = ()) -> Counter[int]:
        """Runs steps after a warm-up, and counts how often each depth was chosen. `paces` are those of the first
        steps.
        """
        paces = iter(paces)
        for number in range(WARM_UP + NUM_STEPS):
            if number == WARM_UP:
                self.chosen, self.num_tokens, self.seconds, self.seconds_to_begin = [], 0, 0.0, 0.0
            self.pace = next(paces, 1.0)
            self.step(num_rows, num_wanted=num_wanted)
        return Counter(spec_info.num_steps for spec_info in self.chosen)

    def check_is_never_much_slower_than_a_fixed_depth(self, num_rows: int) -> None:
        for depth in range(5):
            assert self.tokens_per_s > 0.95 * self.tokens_per_s_at(depth, num_rows), f"depth {depth} is faster"

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def tokens_per_s_at(self, depth: int, num_rows: int) -> float:
        """Returns the expected number of tokens per second at a constant depth."""
        num_tokens = num_rows * sum(self.acceptance**level for level in range(depth + 1))
        seconds = self.verify_s(num_rows * (depth + 1))
        if depth:
            seconds += self.head_s(num_rows * (depth + 1)) + (depth - 1) * self.head_s(num_rows)
        return num_tokens / seconds

    def head_s(self, num_tokens: int) -> float:
        return max(HEAD_S, HEAD_SHARE * self.verify_s(num_tokens))

    def _accepted(self, num_levels: int, num_forced: int) -> int:
        accept_len = 1
        own = self.acceptance if self.reads_drafts or not num_forced else 0.0
        while accept_len <= num_levels and (accept_len <= num_forced or self.numbers.random() < own):
            accept_len += 1
        return accept_len


@pytest.mark.parametrize(
    ("verify_s", "acceptance", "num_rows", "best"),
    [
        (MEMORY_BOUND, 0.9, 1, 4),
        (MEMORY_BOUND, 0.9, 32, 4),
        (COMPUTE_BOUND, 0.5, 8, 0),
        (CPU, 0.02, 1, 0),
        (CPU, 0.5, 32, 0),
    ],
)
def test_the_depth_with_the_most_tokens_a_second_is_taken(
    verify_s: Seconds, acceptance: float, num_rows: int, best: int
) -> None:
    depths = Serving(verify_s, acceptance).run(num_rows)
    assert depths[best] > 0.95 * NUM_STEPS, depths


def slow_in_spells(numbers: Random) -> Iterator[float]:
    """Yields the pace of a machine that is slower by half in some spells, so that depths are measured at different
    speeds.
    """
    for pace in cycle((1.0, 1.5)):
        yield from repeat(pace, numbers.randrange(20, 200))


def bad_at_first(numbers: Random) -> Iterator[float]:
    """Yields the pace of a machine that computes prompts too at first, so that any step may take five times as long."""
    return (numbers.choice((1.0, 1.0, 5.0)) for _ in range(WARM_UP))


STEADY = lambda numbers: ()  # noqa: E731


@pytest.mark.parametrize("verify_s", [MEMORY_BOUND, COMPUTE, CPU], ids=["memory", "compute", "cpu"])
@pytest.mark.parametrize(
    ("acceptance", "paces"),
    [
        *((acceptance, STEADY) for acceptance in (0.0, 0.3, 0.6, 0.9)),
        *((acceptance, slow_in_spells) for acceptance in (0.3, 0.6)),
        (0.5, bad_at_first),
    ],
)
@pytest.mark.parametrize("num_rows", [pytest.param(1, marks=pytest.mark.thorough), 8, MANY])
def test_it_is_never_much_slower_than_any_fixed_depth(
    verify_s: Seconds, acceptance: float, paces: Callable[[Random], Iterable[float]], num_rows: int
) -> None:
    serving = Serving(verify_s, acceptance)
    serving.run(num_rows, paces=paces(Random(num_rows)))
    serving.check_is_never_much_slower_than_a_fixed_depth(num_rows)


@pytest.mark.parametrize(("verify_s", "num_rows"), [(CPU, 8), (CPU, 32), (COMPUTE_BOUND, 8)])
def test_few_rows_that_want_drafts_do_not_slow_the_others(verify_s: Seconds, num_rows: int) -> None:
    serving = Serving(verify_s, 0.8)
    serving.run(num_rows, num_wanted=1)
    assert serving.tokens_per_s > 0.95 * num_rows / verify_s(num_rows)


@pytest.mark.parametrize("verify_s", [COMPUTE, CPU])
@pytest.mark.parametrize("num_rows", [8, MANY])
def test_looking_whether_drafts_would_pay_costs_next_to_nothing(verify_s: Seconds, num_rows: int) -> None:
    """Rows end before the draft head's backlog of unread tokens is full, so the head never has to catch up for lack of
    room.
    """
    serving = Serving(verify_s, 0.2, lifetime=120)
    for _ in range(2):
        serving.run(num_rows)
    assert 0 < serving.seconds_to_begin < 0.012 * serving.seconds
    assert serving.tokens_per_s > 0.98 * serving.tokens_per_s_at(0, num_rows)


@pytest.mark.parametrize(
    ("drafting_s", "seed_s", "idle_s", "begin_s", "begins"),
    [
        (0.046, 0.0, 0.0, 0.0, True),
        (0.049, 0.0, 0.0, 0.0, True),
        (0.0505, 0.0, 0.0, 0.0, False),
        (0.046, 0.003, 0.0, 0.0, True),
        (0.046, 0.006, 0.0, 0.0, False),
        (0.046, 0.0, 0.003, 0.0, True),
        (0.046, 0.0, 0.006, 0.0, False),
        (0.046, 0.0, 0.0, 0.1, True),
        (0.046, 0.0, 0.0, 0.4, False),
    ],
)
def test_drafts_pay_for_all_that_comes_with_them_and_for_beginning_within_64_steps(
    drafting_s: float, seed_s: float, idle_s: float, begin_s: float, begins: bool
) -> None:
    """Drafting must pay for all its costs: a step of 34 ms without drafts gives as many tokens per second as a drafting
    step of 51 ms. After a drafting step the stream is idle for `idle_s`.
    """
    depth = AdaptiveDepth(SpecInfo.chain(1))
    without, drafting = (SpecInfo.chain(1).at_depth(levels) for levels in (0, 1))
    half = (2, 2, 2, 2, 1, 1, 1, 1)
    for _ in range(200):
        begun = SpeculationStats(0, (1,) * 8, draft_s=0.0, verify_s=0.034, extend_s=begin_s, idle_s=idle_s)
        depth.observe(without, unread=EIGHT, stats=begun)
        drafted = SpeculationStats(1, half, draft_s=seed_s, verify_s=drafting_s, extend_s=0.0, idle_s=0.0)
        depth.observe(drafting, unread=EIGHT, stats=drafted)
        depth.launched(without.without_seed())
    num_seeds = 0
    for _ in range(100):
        spec_info = depth.choose(unread=EIGHT, num_wanted=8, num_forced=NONE[:8])
        depth.launched(spec_info)
        num_seeds += spec_info.leaves_seed
    assert num_seeds > 95 if begins else num_seeds < 10


@pytest.mark.parametrize("num_rows", [8, MANY])
def test_after_few_rows_that_drafted_it_costs_many_rows_no_more_to_look(num_rows: int) -> None:
    serving = Serving(CPU, 0.3, lifetime=120)
    serving.run(1)
    serving.num_tokens, serving.seconds, serving.seconds_to_begin = 0, 0.0, 0.0
    for _ in range(NUM_STEPS):
        serving.step(num_rows)
    assert serving.seconds_to_begin < 0.012 * serving.seconds


def steps_between_probes(serving: Serving, num_rows: int, num_probes: int) -> list[int]:
    gaps: list[int] = []
    steps = 0
    while len(gaps) <= num_probes:
        serving.step(num_rows)
        steps += 1
        if serving.chosen[-1].num_steps:
            gaps.append(steps)
            steps = 0
    return gaps[1:]


def test_a_head_that_has_to_catch_up_for_want_of_room_is_tried_then() -> None:
    serving = Serving(CPU, 0.0)
    serving.run(32)
    serving.read_s = lambda num_tokens: 0.001 if num_tokens <= 64 else 1000.0
    serving.chosen = []
    assert max(steps_between_probes(serving, 32, 8)) <= 2 * MAX_UNREAD
    begun = [spec_info for spec_info in serving.chosen if spec_info.leaves_seed and not spec_info.num_steps]
    assert begun


@pytest.mark.thorough
def test_a_head_that_takes_long_to_catch_up_with_rows_that_end_before_is_tried_every_1024_steps() -> None:
    serving = Serving(CPU, 0.0, lifetime=MAX_UNREAD - 8)
    serving.run(8)
    serving.read_s = lambda num_tokens: 0.001 if num_tokens <= 16 else 1000.0
    assert all(1024 <= gap < 1024 + 128 for gap in steps_between_probes(serving, 8, 24)[-3:])


@pytest.mark.thorough
def test_it_follows_a_change_of_load_and_of_text() -> None:
    serving = Serving(CPU, 0.8)
    for num_rows, acceptance, best in [(1, 0.8, 4), (32, 0.8, 1), (1, 0.8, 4), (1, 0.02, 0), (1, 0.8, 4)]:
        serving.acceptance = acceptance
        depths = serving.run(num_rows)
        assert abs(depths.most_common(1)[0][0] - best) <= 1
        assert serving.tokens_per_s > 0.95 * serving.tokens_per_s_at(best, num_rows)


def test_a_step_drafts_only_from_a_seed_that_was_left() -> None:
    serving = Serving(CPU, 0.8)
    for num_rows in (1, 32, 2):
        serving.run(num_rows)
        for before, spec_info in zip(serving.chosen, serving.chosen[1:], strict=False):
            assert not spec_info.num_steps or before.leaves_seed
    without = [spec_info for spec_info in serving.chosen if not spec_info.leaves_seed]
    assert all(not spec_info.num_steps for spec_info in without)
    serving.acceptance = 0.3
    serving.run(32)
    assert sum(not spec_info.leaves_seed for spec_info in serving.chosen) > 0.9 * NUM_STEPS


def test_nothing_is_drafted_where_nobody_wants_it() -> None:
    serving = Serving(MEMORY_BOUND, 0.9)
    for _ in range(100):
        serving.step(4, num_wanted=0)
    assert not any(spec_info.num_steps or spec_info.leaves_seed for spec_info in serving.chosen[1:])
    assert serving.run(4)[4] > 0.95 * NUM_STEPS


def test_a_tree_becomes_shallower_with_the_nodes_that_are_left() -> None:
    deepest = SpecInfo(3, 15, topk=4)
    sizes = {(info.num_steps, info.num_draft_tokens) for info in map(deepest.at_depth, range(4))}
    assert sizes == {(0, 0), (1, 4), (2, 15), (3, 15)}
    serving = Serving(COMPUTE_BOUND, 0.5, deepest=deepest)
    assert serving.run(8)[0] > 0.95 * NUM_STEPS


def test_forced_drafts_are_made_as_deep_as_they_go_and_say_nothing_of_the_head() -> None:
    """Three drafts are forced in every other step. The head is not worth its time in the others."""
    serving, turns = Serving(CPU, 0.05), 600
    for turn in range(turns):
        serving.step(1, num_forced=3 * (turn % 2))
    chosen = [spec_info.num_steps for spec_info in serving.chosen[turns // 2 :]]
    assert chosen[1::2].count(3) > 0.9 * len(chosen) / 2
    assert chosen[::2].count(0) > 0.9 * len(chosen) / 2
    for _ in range(turns):
        serving.step(1)
    assert not any(spec_info.leaves_seed for spec_info in serving.chosen[-16:]), "seeds are left for nothing"


@pytest.mark.parametrize("reads_drafts", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_a_head_that_becomes_good_is_seen_between_steps_of_forced_drafts(reads_drafts: bool) -> None:
    serving = Serving(CPU, 0.02, deepest=replace(SpecInfo.chain(4), reads_drafts=reads_drafts))
    for acceptance in (0.02, 0.9):
        serving.acceptance = acceptance
        for turn in range(2 * NUM_STEPS):
            serving.step(1, num_forced=3 * (turn % 2))
        free = [spec_info.num_steps for spec_info in serving.chosen[-NUM_STEPS::2]]
        are_drafting = [num_steps > 0 for num_steps in free]
        assert are_drafting.count(acceptance > 0.5) > 0.9 * len(free), Counter(free)


def test_steps_whose_drafts_are_all_forced_do_not_make_the_head_look_fast() -> None:
    """Two drafts of the head bring half a token in twice the time of a step without drafts."""
    chain = SpecInfo.chain(2)
    depth = AdaptiveDepth(chain)
    for turn in range(200):
        are_forced = turn > 100
        plain = SpeculationStats(0, (1,), draft_s=0.0, verify_s=0.03, extend_s=0.0)
        depth.observe(chain.at_depth(0), unread=Unread(NONE[:1]), stats=plain)
        drafting = SpeculationStats(
            2,
            (3 if are_forced else 1 + turn % 2,),
            draft_s=0.0 if are_forced else 0.03,
            verify_s=0.03,
            extend_s=0.0,
            num_forced=(2,) if are_forced else (),
        )
        depth.observe(chain, unread=Unread(NONE[:1]), stats=drafting)
    chosen = Counter[int]()
    for _ in range(50):
        spec_info = depth.choose(unread=Unread(NONE[:1]), num_wanted=1, num_forced=NONE[:1])
        depth.launched(spec_info)
        chosen[spec_info.num_steps] += 1
    assert chosen[2] < 5, chosen


def test_drafts_after_forced_ones_that_the_head_does_not_read_are_not_made_and_say_nothing_of_it() -> None:
    """Two drafts are forced in half of the steps. The head is worth its time in the others."""
    serving, turns = Serving(CPU, 0.9, deepest=replace(SpecInfo.chain(4), reads_drafts=False)), Random(5)
    depths: dict[int, Counter[int]] = {0: Counter(), 2: Counter()}
    for _ in range(NUM_STEPS):
        num_forced = turns.choice([0, 2])
        serving.step(1, num_forced=num_forced)
        depths[num_forced][serving.chosen[-1].num_steps] += 1
    assert depths[0][4] > 0.8 * depths[0].total(), depths
    assert depths[2][2] > 0.8 * depths[2].total(), depths


def test_a_fixed_depth_is_always_the_same() -> None:
    depth = FixedDepth(SpecInfo.chain(3))
    assert depth.choose(unread=Unread(NONE), num_wanted=1, num_forced=NONE) == SpecInfo.chain(3)
    assert depth.choose(unread=Unread(NONE), num_wanted=0, num_forced=NONE).num_steps == 0
