"""Tests of the phases of a request's and a prompt's life: the tables of transitions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from common.engine import PhaseRule, Place
from common.kv.pool import LeaseState
from common.telemetry.stats import Timings
from decode_service.messages import Phase
from decode_service.schedule.life import RULES
from prefill_service.prompt import RULES as PROMPT_RULES
from prefill_service.prompt import PromptPhase
from tests.engine.harness import ScriptedEngine


@pytest.mark.parametrize("rules", [RULES, PROMPT_RULES], ids=["request", "prompt"])
def test_a_phase_has_a_row_where_its_place_has_one_and_ends_nowhere(rules: Mapping[Enum, PhaseRule[Any]]) -> None:
    for phase, rule in rules.items():
        assert (rule.place is Place.NOWHERE) == (not rule.following), f"{phase} is no end, or is one and goes on"
        assert (rule.lease is None) == (rule.place in (Place.WAITING, Place.NOWHERE)), f"{phase} holds what it may not"
        assert rule.lease not in (LeaseState.QUARANTINED, LeaseState.FREE), "the pool alone puts a row there"


def test_every_time_has_its_field() -> None:
    assert {rule.seconds for rule in RULES.values()} - {""} <= set(Timings.__dataclass_fields__)


@pytest.mark.parametrize("seconds", sorted({rule.seconds for rule in RULES.values()} - {""}))
def test_the_time_of_a_handoff_is_that_of_its_phases(seconds: str) -> None:
    during = {rule.seconds for rule in RULES.values() if rule.place in (Place.HANDOFF, Place.COMPUTING)}
    assert Timings(**{seconds: 1.0}).handoff_s == float(seconds in during)


@pytest.mark.parametrize(
    ("rules", "first", "last"),
    [(RULES, Phase.QUEUE, Phase.ENDED), (PROMPT_RULES, PromptPhase.QUEUED, PromptPhase.ENDED)],
    ids=["request", "prompt"],
)
def test_every_phase_can_be_reached_and_ends(rules: Mapping[Enum, Any], first: Enum, last: Enum) -> None:
    reached, left = {first}, [first]
    while left:
        new = set(rules[left.pop()].following) - reached
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
