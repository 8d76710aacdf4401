"""Explores the orders in which the engine's thread and its streams can go on.

Two transitions of different processes commute unless they touch the same memory and one of them writes it. If orders
differ only in commuting transitions, only one of them is run (dynamic partial-order reduction: Flanagan and Godefroid,
2005, with sleep sets). So "exhaustive" means: for any order of the streams, an order with the same outcome was run.
This assumes that a piece is one step and that footprints cover everything shared (footprint.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.interleavings.clocks import Clocks
from tests.interleavings.explored_device import Abandoned, ExploredDevice
from tests.interleavings.footprint import HOST, Footprint, Transition


class NotDeterministic(BaseException):
    """Raised if the same choices led to another run: the program depends on something other than its device."""


Program = Callable[[ExploredDevice], None]
"""A function that runs a scenario to its end on a fresh device. It raises AssertionError if something is wrong."""


@dataclass(frozen=True, slots=True)
class Script:
    """An order that can be run again: the process chosen at each point with more than one candidate. After the last
    choice, the default applies.
    """

    choices: tuple[str, ...]

    def __str__(self) -> str:
        spells: list[tuple[str, int]] = []
        for process in self.choices:
            if spells and spells[-1][0] == process:
                spells[-1] = (process, spells[-1][1] + 1)
            else:
                spells.append((process, 1))
        return " ".join(process if count == 1 else f"{process}*{count}" for process, count in spells)

    @classmethod
    def parse(cls, text: str) -> Script:
        """Parses the text that `str` gives for a script. Raises ValueError if it is malformed."""
        choices: list[str] = []
        for spell in text.split():
            process, _, count = spell.partition("*")
            choices += [process] * (int(count) if count else 1)
        return cls(tuple(choices))


@dataclass(frozen=True, slots=True)
class Failure:
    script: Script
    error: BaseException
    num_interleavings: int

    def __str__(self) -> str:
        return f"after {self.num_interleavings} interleavings: {self.error}\nreplay: {self.script}"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an exploration.

    `num_interleavings` counts the distinct orders that were run to their end. `is_exhaustive` says that there are no
    others. `witnessed` holds the observations that at least one order made.
    """

    num_interleavings: int
    is_exhaustive: bool
    failure: Failure | None = None
    witnessed: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Node:
    """A choice of the run: the processes that could go on, those tried from here, and those still to be tried."""

    enabled: tuple[str, ...]
    chosen: str
    sleep: dict[str, Footprint]
    todo: set[str] = field(default_factory=set)
    done: dict[str, Footprint] = field(default_factory=dict)


@dataclass(slots=True)
class _Run:
    """One execution of the program. It replays the choices in `nodes`, then continues with the default choices and
    appends them.
    """

    nodes: list[_Node]
    num_chosen: int = 0

    def execute(self, program: Program) -> tuple[ExploredDevice, BaseException | None]:
        device = ExploredDevice(lambda enabled: self._choose(device, enabled))
        return device, _execute(program, device)

    def _choose(self, device: ExploredDevice, enabled: Sequence[str]) -> str:
        place = self.num_chosen
        self.num_chosen += 1
        if place == len(self.nodes):
            sleep = self._sleep(device)
            awake = [process for process in enabled if process not in sleep]
            if not awake:
                raise Abandoned
            self.nodes.append(_Node(tuple(enabled), awake[0], sleep))
        node = self.nodes[place]
        if node.enabled != tuple(enabled):
            raise NotDeterministic(f"choice {place}: {node.enabled} could go on, and now {tuple(enabled)}")
        return node.chosen

    def _sleep(self, device: ExploredDevice) -> dict[str, Footprint]:
        """Returns the processes that need not be tried at the next choice: an earlier run took them from an earlier
        node, and no transition since conflicts with them.
        """
        if not self.nodes:
            return {}
        before = self.nodes[-1]
        asleep = {**before.sleep, **before.done}
        since = device.trace[_place_of_last_choice(device.trace) :]
        return {
            process: footprint
            for process, footprint in asleep.items()
            if all(done.process != process and not done.footprint.conflicts_with(footprint) for done in since)
        }


def _place_of_last_choice(trace: Sequence[Transition]) -> int:
    return next(place for place in reversed(range(len(trace))) if len(trace[place].enabled) > 1)


def _choice_places(trace: Sequence[Transition]) -> list[int]:
    return [place for place, transition in enumerate(trace) if len(transition.enabled) > 1]


def explore(program: Program) -> Report:
    """Runs orders of `program` until all were run, or one fails."""
    nodes: list[_Node] = []
    num_interleavings = 0
    witnessed: set[str] = set()
    while True:
        device, error = _Run(nodes).execute(program)
        if not isinstance(error, Abandoned):
            num_interleavings += 1
            witnessed |= device.witnessed
        if error is not None and not isinstance(error, Abandoned):
            script = Script(tuple(node.chosen for node in nodes))
            return Report(num_interleavings, False, Failure(script, error, num_interleavings))
        _note_races(device.trace, nodes)
        places = _choice_places(device.trace)
        for node, place in zip(nodes, places, strict=False):
            node.done[node.chosen] = device.trace[place].footprint
        while nodes and not (nodes[-1].todo - nodes[-1].done.keys() - nodes[-1].sleep.keys()):
            nodes.pop()
        if not nodes:
            return Report(num_interleavings, True, witnessed=frozenset(witnessed))
        node = nodes[-1]
        node.chosen = min(node.todo - node.done.keys() - node.sleep.keys())


def _execute(program: Program, device: ExploredDevice) -> BaseException | None:
    try:
        program(device)
    except (Exception, Abandoned) as error:
        return error
    return None


def _note_races(trace: Sequence[Transition], nodes: Sequence[_Node]) -> None:
    """Finds the transitions that conflict with an earlier one and could have come before it. Notes at the choice of the
    earlier one that the other order is to be tried.
    """
    node_of = dict(zip(_choice_places(trace), nodes, strict=False))
    clocks = Clocks(joins_conflicts=True)
    for transition in trace:
        for race in clocks.add(transition):
            if (node := node_of.get(race)) is not None:
                is_enabled = transition.process in node.enabled
                node.todo.update((transition.process,) if is_enabled else node.enabled)


@dataclass(frozen=True, slots=True)
class RandomOrder:
    """One random order that was run. Orders without an observable difference have the same `digest`."""

    digest: int
    script: Script
    error: BaseException | None
    witnessed: frozenset[str]


def random_order(program: Program, seed: str) -> RandomOrder:
    """Runs one random order. Each run favours some processes throughout, so that their transitions come very early or
    very late.
    """
    numbers = random.Random(seed)
    choices: list[str] = []
    patience = numbers.choice((0.05, 0.3, 0.7, 0.95))

    def choose(enabled: Sequence[str]) -> str:
        is_host_next = enabled[0] == HOST and numbers.random() < patience
        choices.append(HOST if is_host_next else numbers.choice(enabled))
        return choices[-1]

    device = ExploredDevice(choose)
    error = _execute(program, device)
    clocks = Clocks(joins_conflicts=True)
    for transition in device.trace:
        clocks.add(transition)
    return RandomOrder(clocks.digest, Script(tuple(choices)), error, frozenset(device.witnessed))


def sample(program: Program, *, num_runs: int, seed: int) -> Report:
    """Runs `num_runs` random orders, or fewer if one fails."""
    seen: set[int] = set()
    witnessed: set[str] = set()
    for number in range(num_runs):
        order = random_order(program, f"{seed}/{number}")
        seen.add(order.digest)
        witnessed |= order.witnessed
        if order.error is not None:
            return Report(len(seen), False, Failure(order.script, order.error, len(seen)))
    return Report(len(seen), False, witnessed=frozenset(witnessed))


def replay(program: Program, script: Script) -> BaseException | None:
    """Runs `program` in the order of `script`, as far as that is possible. Returns the exception it raised, or None."""
    left: Iterator[str] = iter(script.choices)

    def choose(enabled: Sequence[str]) -> str:
        wanted = next(left, enabled[0])
        return wanted if wanted in enabled else enabled[0]

    return _execute(program, ExploredDevice(choose))


def _kind_of(error: BaseException) -> tuple[type, str]:
    return type(error), str(error)[:10]


def shorten(program: Program, failure: Failure) -> Failure:
    """Simplifies a failure: returns one of the same kind whose script chooses the host wherever that does not prevent
    the failure.
    """
    choices, error = list(failure.script.choices), failure.error
    for size in (64, 16, 4, 1):
        for start in range(0, len(choices), size):
            tried = [*choices[:start], *[HOST] * len(choices[start : start + size]), *choices[start + size :]]
            if tried == choices:
                continue
            found = replay(program, Script(tuple(tried)))
            if found is not None and _kind_of(found) == _kind_of(error):
                choices, error = tried, found
    while choices and choices[-1] == HOST:
        choices.pop()
    return Failure(Script(tuple(choices)), error, failure.num_interleavings)
