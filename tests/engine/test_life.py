"""Tests of the phases of a request's and a prompt's life: the tables of transitions, and the rule that only `Lives`
changes a phase.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from common.kv.pool import LeaseState
from common.request_stats import Timings
from decode_service.messages import Phase
from decode_service.schedule.life import RULES, Place
from prefill_service.prompt import PromptPhase
from prefill_service.schedule.life import RULES as PROMPT_RULES
from tests.engine.harness import ScriptedEngine

ROOT = Path(__file__).parents[2]
ENGINE_FOLDERS = ("decode_service", "prefill_service", "common/kv")
DECODE_LIFE, PREFILL_LIFE = "decode_service/schedule/life.py", "prefill_service/schedule/life.py"
SUMMING_FOLDERS = ("baton", "benchmarks", "common", "decode_service", "gateway", "scripts")
WRITERS = {
    "phase": {DECODE_LIFE, PREFILL_LIFE},
    "lease": {DECODE_LIFE, PREFILL_LIFE},
    "state": {DECODE_LIFE, PREFILL_LIFE, "common/kv/pool.py"},
}
"""For each attribute, the files that may write it on an object other than their own `self`."""


def sources() -> dict[str, str]:
    paths = [path for folder in ENGINE_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def targets_of(node: ast.AST) -> list[ast.expr]:
    """Returns the targets of an assignment. Each member of a tuple counts as a target of its own."""
    assigned = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    left = [target for target in assigned if isinstance(target, ast.expr)]
    found = []
    while left:
        target = left.pop()
        if isinstance(target, ast.Tuple | ast.List):
            left += target.elts
        else:
            found.append(target)
    return found


def is_setattr_of(node: ast.AST, attribute: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr" and attribute in ast.unparse(node)


def writes(source: str, attribute: str) -> bool:
    """Returns whether the source assigns to the attribute on any object but `self`."""
    return any(
        is_setattr_of(node, attribute)
        or any(
            isinstance(target, ast.Attribute)
            and target.attr == attribute
            and not (isinstance(target.value, ast.Name) and target.value.id == "self")
            for target in targets_of(node)
        )
        for node in ast.walk(ast.parse(source))
    )


@pytest.mark.parametrize("attribute", WRITERS)
def test_one_module_of_each_engine_writes(attribute: str) -> None:
    found = {path for path, source in sources().items() if writes(source, attribute)}
    assert found == WRITERS[attribute]


@pytest.mark.parametrize(
    "planted",
    [
        "req.phase = Phase.QUEUE",
        "row.req.phase: Phase = Phase.QUEUE",
        "self._row.req.phase = Phase.QUEUE",
        "req.phase, req.lease = Phase.QUEUE, None",
        'setattr(req, "phase", Phase.QUEUE)',
    ],
)
def test_a_second_writer_is_found(planted: str) -> None:
    scheduler = sources()["decode_service/schedule/scheduler.py"]
    assert not writes(scheduler, "phase") and writes(f"{scheduler}\n{planted}\n", "phase")


def test_every_phase_has_its_rule_and_every_time_its_field() -> None:
    assert set(RULES) == set(Phase)
    fields = set(Timings.__dataclass_fields__)
    for phase, rule in RULES.items():
        assert rule.seconds in fields or not rule.seconds
        assert (rule.place is Place.NOWHERE) == (not rule.following), f"{phase} is no end, or is one and goes on"
        assert (rule.lease is None) == (rule.place in (Place.WAITING, Place.NOWHERE)), f"{phase} holds what it may not"
        assert rule.lease not in (LeaseState.QUARANTINED, LeaseState.FREE), "the pool alone puts a row there"


@pytest.mark.parametrize("seconds", sorted({rule.seconds for rule in RULES.values()} - {""}))
def test_the_time_of_a_handoff_is_that_of_its_phases(seconds: str) -> None:
    during = {rule.seconds for rule in RULES.values() if rule.place in (Place.LANDING, Place.LOCAL)}
    assert Timings(**{seconds: 1.0}).handoff_s == float(seconds in during)


def sums_of_timings(source: str) -> list[str]:
    """Returns the source text of each addition with a duration field of Timings as a term."""
    names = {name for name in Timings.__dataclass_fields__ if name.endswith("_s")}
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and any(isinstance(term, ast.Attribute) and term.attr in names for term in (node.left, node.right))
    ]


def test_timings_alone_add_up_their_phases() -> None:
    """Timings adds up its own fields, and nothing else may do so: if Timings gets a new field for time that another
    field included before, a sum made elsewhere would lack that time.
    """
    paths = [path for folder in SUMMING_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in paths if sums_of_timings(path.read_text())}
    assert found == {"common/request_stats.py"}


@pytest.mark.parametrize(
    ("rules", "first", "last"),
    [(RULES, Phase.QUEUE, Phase.ENDED), (PROMPT_RULES, PromptPhase.QUEUED, PromptPhase.ENDED)],
    ids=["request", "prompt"],
)
def test_every_phase_can_be_reached_and_ends(rules: Mapping[Enum, Any], first: Enum, last: Enum) -> None:
    reached, left = {first}, [first]
    while left:
        new = rules[left.pop()].following - reached
        reached |= new
        left += new
    assert reached == set(rules) == set(type(first))
    assert all(last in rule.following for rule in rules.values() if rule.following)


@pytest.mark.parametrize("phase", [Phase.BOOTSTRAP, Phase.DECODE, Phase.RETRACTING])
def test_a_phase_that_cannot_follow_is_refused(phase: Phase) -> None:
    scripted = ScriptedEngine()
    scripted.submit("a", [1, 2, 3], 4)
    scripted.step()
    (req,) = scripted.engine.lives.requests.values()
    assert req.phase is Phase.PREFILL
    with pytest.raises(AssertionError, match="does not follow"):
        scripted.engine.lives.enter(req, phase)


def test_a_running_requests_tokens_are_those_it_has() -> None:
    """The request's token ids are right at each step while it runs, and not only once it has left its row."""
    scripted = ScriptedEngine()
    outcome = scripted.submit("a", [1, 2, 3], 8)
    scripted.start("a")
    num_seen = set()
    while not outcome.has_ended:
        scripted.step()
        scripted.forward.run_all()
        for req in scripted.engine.lives.requests.values():
            assert req.token_ids == [1, 2, 3, *outcome.token_ids]
            num_seen.add(len(outcome.token_ids))
    assert len(num_seen) > 3, "it was never looked at while it ran"
