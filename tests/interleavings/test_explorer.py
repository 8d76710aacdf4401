"""Tests the explorer itself on programs so small that their orders can be counted by hand, or all be run."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from common.device.stream import Event
from tests.interleavings.explored_device import ExploredDevice
from tests.interleavings.explorer import Program, Script, explore, replay, sample, shorten
from tests.interleavings.footprint import HOST, Shared

Body = Callable[["Rig"], None]


class Rig:
    """A device with two streams, and four numbers whose accesses are tracked one by one."""

    def __init__(self, device: ExploredDevice) -> None:
        self.device = device
        self.first = device.new_stream("first")
        self.second = device.new_stream("second")
        self.numbers = torch.zeros(4, dtype=torch.int64)

    def mix(self, place: int, *others: int) -> Callable[[], None]:
        """Returns a piece that reads `others` and writes `place`. Its result depends on the order of the pieces."""

        def mix() -> None:
            total = self.numbers[list(others)].sum() if others else 0
            self.numbers[place] = self.numbers[place] * 3 + total + 1

        return mix


def program(body: Body, outcomes: list[tuple[int, ...]] | None = None, *, lags: bool = False) -> Program:
    """Returns a program that runs `body` on a fresh rig and appends the final numbers to `outcomes`. With `lags`, the
    host's writes to them happen later.
    """

    def run(device: ExploredDevice) -> None:
        if lags:
            device.lag_schedule_side()
        rig = Rig(device)
        with device.exploring([Shared("numbers", rig.numbers)]):
            body(rig)
        if outcomes is not None:
            outcomes.append(tuple(rig.numbers.tolist()))

    return run


def orders(body: Body) -> int:
    report = explore(program(body))
    assert report.is_exhaustive and report.failure is None
    return report.num_interleavings


def test_pieces_that_share_nothing_have_one_order() -> None:
    def apart(rig: Rig) -> None:
        for _ in range(3):
            rig.first.enqueue(rig.mix(0))
            rig.second.enqueue(rig.mix(1))

    assert orders(apart) == 1


@pytest.mark.parametrize("num_pieces", [1, 2, 3])
def test_pieces_that_write_the_same_number_have_every_order(num_pieces: int) -> None:
    def against(rig: Rig) -> None:
        for _ in range(num_pieces):
            rig.first.enqueue(rig.mix(0))
            rig.second.enqueue(rig.mix(0))

    assert orders(against) == math.comb(2 * num_pieces, num_pieces)


def test_readers_may_change_places_and_a_writer_may_not() -> None:
    def two_readers(rig: Rig) -> None:
        rig.first.enqueue(rig.mix(0, 2))
        rig.second.enqueue(rig.mix(1, 2))

    def a_reader_and_a_writer(rig: Rig) -> None:
        rig.first.enqueue(rig.mix(0, 2))
        rig.second.enqueue(rig.mix(2))

    assert (orders(two_readers), orders(a_reader_and_a_writer)) == (1, 2)


def test_a_stream_that_waits_for_the_other_comes_after_it() -> None:
    def behind(rig: Rig) -> None:
        rig.first.enqueue(rig.mix(0))
        rig.second.wait(rig.first.record())
        rig.second.enqueue(rig.mix(0))

    assert orders(behind) == 1


def test_a_piece_that_is_not_there_yet_may_come_first() -> None:
    def enqueued_later(rig: Rig) -> None:
        third = rig.device.new_stream("third")
        rig.first.enqueue(rig.mix(0))
        rig.second.enqueue(rig.mix(1))
        rig.second.record().synchronize(1.0)
        third.enqueue(rig.mix(0))

    assert orders(enqueued_later) == 2


def test_the_host_may_look_at_an_event_before_it_and_after() -> None:
    answers = set()

    def look(rig: Rig) -> None:
        rig.first.enqueue(rig.mix(0))
        rig.first.enqueue(rig.mix(0))
        answers.add(rig.first.record().is_done())

    assert orders(look) == 2
    assert answers == {False, True}


def test_a_piece_comes_between_the_hosts_look_and_what_it_does_then() -> None:
    def look_then_write(rig: Rig) -> None:
        rig.first.enqueue(rig.mix(0))
        if not rig.first.record().is_done():
            rig.numbers[0] = 7

    outcomes: list[tuple[int, ...]] = []
    explore(program(look_then_write, outcomes))
    assert {numbers[0] for numbers in outcomes} == {1, 7 * 3 + 1, 7}


def test_a_piece_that_nobody_waits_for_may_come_before_the_host_looks() -> None:
    def look(rig: Rig) -> None:
        rig.first.enqueue(rig.mix(0))
        assert rig.numbers[0] == 0, "too early"

    failure = explore(program(look)).failure
    assert failure is not None and "too early" in str(failure.error)


def test_what_a_lagging_host_wrote_is_late_unless_it_is_waited_for() -> None:
    def write_then_launch(rig: Rig, *, waits: bool) -> None:
        rig.numbers[0] = 5
        if waits:
            rig.first.wait(rig.device.schedule_stream.record())
        rig.first.enqueue(rig.mix(1, 0))

    outcomes: dict[bool, list[tuple[int, ...]]] = {True: [], False: []}
    for waits, found in outcomes.items():
        explore(program(functools.partial(write_then_launch, waits=waits), found, lags=True))
    assert {numbers[1] for numbers in outcomes[True]} == {6}
    assert {numbers[1] for numbers in outcomes[False]} == {6, 1}


def test_a_blocked_host_leaves_the_rest_as_late_or_as_early_as_it_may_be() -> None:
    def wait_for_the_first(rig: Rig) -> None:
        rig.second.enqueue(rig.mix(1))
        rig.first.enqueue(rig.mix(0))
        rig.first.record().synchronize(1.0)
        rig.numbers[1] = rig.numbers[0] * 10

    outcomes: list[tuple[int, ...]] = []
    explore(program(wait_for_the_first, outcomes))
    assert {numbers[:2] for numbers in outcomes} == {(1, 10), (1, 31)}


def test_a_failing_order_is_told_as_a_script_that_fails_again() -> None:
    def racy(rig: Rig) -> None:
        for _ in range(3):
            rig.second.enqueue(rig.mix(1))
        rig.first.enqueue(rig.mix(0))
        rig.first.enqueue(rig.mix(0))
        assert rig.numbers[0] != 1, "half done"

    failure = explore(program(racy)).failure
    assert failure is not None and "half done" in str(failure.error)
    short = shorten(program(racy), failure)
    assert short.script.choices.count("first") == 1 and "second" not in short.script.choices
    again = replay(program(racy), Script.parse(str(short.script)))
    assert isinstance(again, AssertionError) and "half done" in str(again)


def random_body(numbers: random.Random) -> Body:
    """Returns a body with a few pieces on both streams, waits between them, and a host that polls, writes and waits."""
    steps: list[tuple[str, int, tuple[int, ...]]] = []
    for _ in range(numbers.randint(4, 5)):
        kind = numbers.choice(["first", "first", "second", "second", "wait", "look", "write", "block", "rest"])
        others = tuple(numbers.sample(range(3), numbers.randint(0, 2)))
        steps.append((kind, numbers.randrange(3), others))

    def body(rig: Rig) -> None:
        events: list[Event] = []
        for kind, place, others in steps:
            if kind in ("first", "second"):
                stream = rig.first if kind == "first" else rig.second
                stream.enqueue(rig.mix(place, *others))
                events.append(stream.record())
            elif kind == "wait" and events:
                rig.second.wait(events[place % len(events)])
            elif kind == "look" and events:
                if events[place % len(events)].is_done():
                    rig.mix(3)()
            elif kind == "write":
                rig.mix(place, *others)()
            elif kind == "rest":
                rig.device.idle()
            elif kind == "block" and events:
                events[place % len(events)].synchronize(1.0)

    return body


def every_order(body: Body, *, lags: bool) -> list[tuple[int, ...]]:
    """Returns the outcomes of all orders. It runs each of them, including those that the explorer would skip."""
    outcomes: list[tuple[int, ...]] = []
    choices: list[int] = []
    while True:
        options: list[int] = []

        def choose(enabled: Sequence[str], options: list[int] = options) -> str:
            place = len(options)
            options.append(len(enabled))
            if place == len(choices):
                choices.append(0)
            return enabled[choices[place]]

        program(body, outcomes, lags=lags)(ExploredDevice(choose))
        while choices and choices[-1] == options[len(choices) - 1] - 1:
            choices.pop()
        if not choices:
            return outcomes
        choices[-1] += 1


@pytest.mark.parametrize("seed", [*range(7), *range(8, 12), 15, 23, 35])  # 7 would have tens of thousands of orders
def test_nothing_that_any_order_comes_to_is_missed(seed: int) -> None:
    body, lags = random_body(random.Random(seed)), seed % 2 == 1
    outcomes: list[tuple[int, ...]] = []
    report = explore(program(body, outcomes, lags=lags))
    assert report.is_exhaustive and report.failure is None
    assert set(outcomes) == set(every_order(body, lags=lags))


def test_random_orders_are_counted_once_each() -> None:
    def against(rig: Rig) -> None:
        for _ in range(2):
            rig.first.enqueue(rig.mix(0))
            rig.second.enqueue(rig.mix(0))

    report = sample(program(against), num_runs=300, seed=0)
    assert (report.num_interleavings, report.is_exhaustive) == (6, False)


def test_a_script_is_read_as_it_is_written() -> None:
    script = Script((HOST, HOST, "first", HOST, "second", "second"))
    assert str(script) == "host*2 first host second*2"
    assert Script.parse(str(script)) == script
