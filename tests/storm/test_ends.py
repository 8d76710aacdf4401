"""Tests that duplicate, missing and wrong ends are reported, also for calls that resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.service_process import ServiceProcess
from tests.storm.ends import ServerEnd, ends_of, needless_cancels, unseen_failures, wrong_ends
from tests.storm.storm import LEFT, ClientEnd


def problems(outcome: str, *logged: str, has_started: bool = True, resumes: bool = False) -> list[str]:
    """Returns the problems that are found if a client saw `outcome` and services logged the outcomes `logged`.
    "outcome@2" was logged by process 2; without "@", process 1 logged it.
    """
    ends = [ServerEnd("r", instance or "1", name) for name, _, instance in (entry.partition("@") for entry in logged)]
    return wrong_ends([ClientEnd("r", outcome, has_started)], ends, resumes=resumes)


@pytest.mark.parametrize(
    ("outcome", "logged"),
    [("length", "length"), ("engine_fault", "engine_fault"), (LEFT, "cancelled"), (LEFT, "length")],
)
def test_one_line_as_its_client_saw_it_is_right(outcome: str, logged: str) -> None:
    assert problems(outcome, logged) == []
    assert problems(outcome, logged, resumes=True) == []


def test_a_request_that_was_left_before_its_first_event_may_never_have_been_admitted() -> None:
    assert problems(LEFT, has_started=False) == []
    assert problems(LEFT, has_started=True)


@pytest.mark.parametrize(
    ("outcome", "logged"),
    [
        ("length", []),
        ("length", ["length", "length"]),
        ("length", ["cancelled", "length"]),
        ("length", ["engine_fault"]),
        ("engine_fault", ["length"]),
        ("engine_fault", ["engine_fault", "length"]),
        (LEFT, ["cancelled", "cancelled"]),
        (LEFT, ["length", "cancelled"]),
    ],
)
def test_another_end_or_number_of_ends_is_told(outcome: str, logged: list[str]) -> None:
    (problem,) = problems(outcome, *logged)
    assert problem == f"r: its client saw {outcome}, the log has {logged}"


def test_where_clients_resume_calls_may_break_but_a_process_ends_a_request_once() -> None:
    assert problems("length", "no_prefill", "cancelled", "length", resumes=True) == []
    assert problems("length", "length", "length@2", resumes=True) == [], "its Finished was lost with the first process"
    assert problems(LEFT, resumes=True) == [], "it was killed and wrote none"
    assert problems("length", "length", "length", resumes=True)
    assert problems("length", "length", "engine_fault", resumes=True)
    assert problems("length", "cancelled", resumes=True)
    assert problems("length", resumes=True)
    assert problems(LEFT, "length", "length", resumes=True)


def test_an_end_of_a_request_that_nobody_sent_is_told() -> None:
    assert wrong_ends([], [ServerEnd("r", "1", "length")], resumes=False) == ["r: nobody sent it"]


def test_a_failure_that_a_client_left_before_is_a_failure_too() -> None:
    seen = [ClientEnd("a", LEFT, has_started=True), ClientEnd("b", "engine_fault", has_started=True)]
    logged = [ServerEnd("a", "1", "engine_fault", "why"), ServerEnd("b", "1", "engine_fault", "as the client saw")]
    assert unseen_failures(seen, logged) == ["why"]


def test_a_request_that_is_cancelled_while_its_client_stays_is_told() -> None:
    seen = [ClientEnd("a", LEFT, has_started=True), ClientEnd("b", "length", has_started=True)]
    logged = [ServerEnd("a", "1", "cancelled"), ServerEnd("b", "1", "cancelled"), ServerEnd("b", "1", "length")]
    assert needless_cancels(seen, logged) == ["b was cancelled, and its client had stayed"]


def test_ends_are_read_from_the_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "decode.log"
    finished = {"event": "request_finished", "request_id": "r", "instance_id": "i", "outcome": "engine_fault"}
    whole = json.dumps({**finished, "error": "why"})
    lines = ["no json", json.dumps({"event": "config"}), whole[:-9] + whole, whole]
    log.write_text("\n".join(lines))
    service = ServiceProcess(name="decode-0", role="decode", address="", arguments=(), log_file=log)
    assert ends_of([service]) == [ServerEnd("r", "i", "engine_fault", "why")]
