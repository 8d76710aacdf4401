"""Tests in which requests come, leave and are retracted while frames, memory, streams and forwards fail. Each request
ends exactly once, and correctly.

`python -m tests.storm` sends 1,000 requests in each of twelve settings.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.local_pair import LocalPair
from baton.service_process import ProcessRole
from tests.faults.plan import Action, Fault, FaultPlan
from tests.storm.ends import ServerEnd, ends_of
from tests.storm.oracle import Case, make_cases
from tests.storm.pairs import Models, Setting, disturbed_pair, faults_everywhere, frame_faults, lent_and_frame_faults
from tests.storm.storm import LEFT, ClientEnd, Storm, StormReport, send_storm
from tests.storm.verdict import Faults, dead_points, faults_of, problems_of, unexplained, visits_of
from tests.support.running_pair import wait_until

NewPair = Callable[..., LocalPair]
STORM = Storm(num_requests=160)
SHORT = Storm(num_requests=48)
APART = Setting(overlap=False, speculates=False)
LENT = Setting(overlap=True, speculates=True, shares_memory=True)
LOCAL = Setting(overlap=True, speculates=True, prefills_locally=True)
TWICE = "the handoff broke the protocol: row 2: group 'target': layers slice(0, 2), tokens slice(0, 16) came twice"
STEP_MEMORY = "a decode step failed: injected at memory.host"
LANDING_MEMORY = "landing KV failed: injected at memory.host"
SEEN = [ClientEnd(name, "length", has_started=True) for name in "abc"]
LOGGED = [ServerEnd(name, "one", "length") for name in "abc"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models.save(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def cases(models: Models) -> list[Case]:
    return make_cases(models.target, 20)


@pytest.mark.parametrize(
    ("setting", "plan", "storm"),
    [
        (Setting(overlap=True, speculates=True), frame_faults(0), SHORT),
        pytest.param(APART, faults_everywhere(0, APART), STORM, marks=pytest.mark.thorough),
        pytest.param(LENT, lent_and_frame_faults(0), SHORT, marks=pytest.mark.thorough),
        pytest.param(LOCAL, faults_everywhere(0, LOCAL), STORM, marks=pytest.mark.thorough),
    ],
    ids=["frames-overlap-drafts", "everywhere", "shared-memory-overlap-drafts", "everywhere-local-prefill"],
)
def test_each_request_ends_once_and_with_its_own_tokens(
    models: Models, cases: list[Case], forked: NewPair, tmp_path: Path, setting: Setting, plan: FaultPlan, storm: Storm
) -> None:
    with disturbed_pair(models, setting, plan, tmp_path, kind=forked) as pair:
        report = asyncio.run(send_storm(pair.client.address, cases, storm))
        wait_until(pair.holds_nothing, about=lambda: (pair.load(), pair.prefill_load()))
    faults, ends = faults_of(pair.processes.services), ends_of(pair.processes.decode)
    assert problems_of(report, ends, faults, num_requests=storm.num_requests, speculates=setting.speculates) == []
    assert dead_points(plan, faults, visits_of(pair.processes.services)) == []
    assert report.num_finished > storm.num_requests // 3, report
    assert (report.num_handed_off < report.num_finished) == setting.prefills_locally


def num_alike(said: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    return next((place for place, (one, other) in enumerate(zip(said, prompt, strict=False)) if one != other), 0)


def test_cases_branch_go_on_repeat_prompts_and_stay_apart(cases: list[Case]) -> None:
    pairs = [(one, other) for other in cases for one in cases[: other.number]]
    within = [(one, other) for one, other in pairs if one.cache_salt == other.cache_salt]
    apart = [(one, other) for one, other in pairs if one.cache_salt != other.cache_salt]
    assert any(3 <= num_alike(one.prompt, other.prompt) < len(one.prompt) for one, other in within)
    assert any(num_alike((*one.prompt, *one.token_ids), other.prompt) > len(one.prompt) for one, other in within)
    assert any(one.prompt == other.prompt and one.token_ids != other.token_ids for one, other in within)
    assert any(num_alike(one.prompt, other.prompt) >= 3 for one, other in apart)
    assert not all(case.is_cached for case in cases)


def test_ends_that_no_fault_explains_are_told() -> None:
    def problems(**changes: Any) -> list[str]:
        as_it_should: dict[str, Any] = {"num_finished": 6, "num_aborted": 2, "ends": SEEN, "num_retractions": 1}
        as_it_should |= {"failed": Counter({"INTERNAL ENGINE_FAULT": 2}), "texts": [TWICE] * 2}
        as_it_should |= {"num_attempts": 8, "num_handed_off": 6, "num_accepted": 3}
        as_it_should |= {"num_cached_tokens": 5, "num_shared_tokens": 2, "num_constrained": 1}
        return problems_of(
            StormReport(**{**as_it_should, **changes}), LOGGED, faults, num_requests=len(SEEN), speculates=True
        )

    faults: Faults = Counter({("prefill", "handoff.frame", "duplicate"): 2, ("prefill", "handoff.frame", "drop"): 5})
    assert problems() == []
    for changes, told in (
        ({"wrong": ["case 3: tokens"]}, "case 3"),
        ({"ends": [*SEEN, ClientEnd("d", LEFT, has_started=False)]}, "4 ends of 3 requests"),
        ({"ends": [*SEEN[:2], ClientEnd("c", "eos", has_started=True)]}, "c: its client saw eos, .*'length'"),
        ({"failed": Counter({"INTERNAL PROTOCOL": 2})}, "2 failed with INTERNAL PROTOCOL"),
        ({"texts": [TWICE] * 3}, "prefill handoff.frame duplicate: 2 happened, .* need 3"),
        ({"num_retractions": 0}, "no request was retracted"),
        ({"num_accepted": 0}, "no request had a draft accepted"),
        ({"num_attempts": 6}, "no request was handed over again"),
        ({"num_cached_tokens": 0}, "no request began with cached KV"),
        ({"num_shared_tokens": 0}, "no request began with KV of another prompt"),
        ({"num_constrained": 0}, "no request ended in its grammar"),
    ):
        (problem,) = problems(**changes)
        assert re.search(told, problem)


@pytest.mark.parametrize(
    ("texts", "faults", "told"),
    [
        ([STEP_MEMORY] * 33, {("decode", "memory.host", "fail"): 2}, None),
        ([STEP_MEMORY] * 32 + [LANDING_MEMORY], {("decode", "memory.host", "fail"): 2}, None),
        (["a decode step failed: stream.forward.verify"] * 32, {("decode", "stream.forward.verify", "raise"): 1}, None),
        (["landing KV failed: stream.landing.land"], {("decode", "stream.landing.land", "raise"): 1}, None),
        ([STEP_MEMORY] * 33, {("decode", "memory.host", "fail"): 1}, "1 happened, the failures need 2"),
        ([STEP_MEMORY] * 32 + [LANDING_MEMORY], {("decode", "memory.host", "fail"): 1}, "need 2"),
        ([STEP_MEMORY], {("prefill", "memory.host", "fail"): 9}, "0 happened, the failures need 1"),  # only a retry
        ([TWICE], {("decode", "memory.host", "fail"): 9}, "0 happened, the failures need 1"),
        (["a decode step failed: division by zero"], {("decode", "memory.host", "fail"): 9}, "division by zero"),
        ([TWICE.replace("came twice", "are outside")], {("prefill", "handoff.frame", "duplicate"): 9}, "are outside"),
    ],
)
def test_a_fault_explains_only_the_failures_it_can_cause_where_it_happened(
    texts: list[str], faults: dict[tuple[ProcessRole, str, str], int], told: str | None
) -> None:
    problems = unexplained(texts, Counter(faults))
    if told is None:
        assert problems == []
    else:
        (problem,) = problems
        assert told in problem


def test_planned_faults_that_never_happened_are_told() -> None:
    drop, late = (
        Fault(point="handoff.frame", action=Action.DROP, rate=0.01),
        Fault(point="stream.forward", action=Action.RAISE, at=40),
    )

    def problems(num_frames: int, num_pieces: int, *happened: Fault, is_long: bool = False) -> list[str]:
        faults: Faults = Counter(("prefill", fault.point, fault.action.value) for fault in happened)
        visits = Counter({"handoff.frame": num_frames, "stream.forward": num_pieces})
        return dead_points(FaultPlan(faults=(drop, late)), faults, visits, is_long=is_long)

    assert problems(999, 39) == []
    assert problems(1000, 40, drop, late) == problems(1000, 40, drop, late, is_long=True) == []
    assert problems(1000, 40, late) == ["drop at handoff.frame never happened in 1000 visits or more"]
    assert problems(1000, 40, drop) == ["raise at stream.forward never happened in 40 visits or more"]
    assert problems(1, 0, drop) == ["nothing came by stream.forward"]
    assert len(problems(1, 1, is_long=True)) == 2
