"""Tests of `baton self-chat`: the requests that it sends to a served model, and the options that it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from baton.cli.main import app
from baton.client import Client
from baton.v1 import inference_pb2
from tests.client.scripted_inference import ScriptedServer, delta, finished, started
from tests.support.models import END_ID
from tests.training.cases import QUESTION_LIMIT, arrays, save_data
from training.generate import ANSWER_TEMPERATURES, read_openings, read_questions


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    ended = finished(inference_pb2.FINISH_REASON_EOS, num_completion_tokens=2)
    server.inference.script = [started(), delta([40, END_ID], "How?"), ended]
    yield server
    server.stop()


def run(server: ScriptedServer, out: Path, model: Path, *options: str) -> Result:
    where = ["--address", server.address, "--out", str(out), "--model", str(model)]
    return CliRunner().invoke(app, ["self-chat", *where, *options])


def test_the_command_writes_the_file(server: ScriptedServer, target_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "data.npz"
    result = run(server, out, target_dir, "--conversations", "3", "--max-answer-tokens", "9")
    assert (result.exit_code, "3 conversations added to 0" in result.stderr) == (0, True), result.stderr
    assert len(arrays(out)["answer_start"]) == 3
    assert {server.inference.requests.get_nowait().sampling.max_tokens for _ in range(6)} == {QUESTION_LIMIT, 9}
    result = run(server, out, target_dir, "--conversations", "4", "--max-answer-tokens", "9")
    assert "1 conversations added to 3" in result.stderr
    options = json.loads(arrays(out)["options"])
    with Client(server.address) as client:
        assert options["model"] == client.model_info().digest
    assert options["temperatures"] == list(ANSWER_TEMPERATURES)


def test_the_command_s_sources_and_temperatures(server: ScriptedServer, target_dir: Path, tmp_path: Path) -> None:
    questions, openings = tmp_path / "questions.jsonl", tmp_path / "openings.txt"
    questions.write_text('{"question": "Why?"}\n{"question": "Why not?"}\n')
    openings.write_text("Write")
    result = run(
        server,
        tmp_path / "asked.npz",
        target_dir,
        *("--questions", str(questions), "--conversations", "2", "--temperatures", "0.5"),
    )
    assert result.exit_code == 0, result.stderr
    assert [server.inference.requests.get_nowait().sampling.temperature for _ in range(2)] == [0.5, 0.5]
    assert server.inference.requests.empty()
    assert json.loads(arrays(tmp_path / "asked.npz")["options"])["questions"] == read_questions(questions).digest

    result = run(server, tmp_path / "begun.npz", target_dir, "--openings", str(openings), "--conversations", "1")
    assert result.exit_code == 0, result.stderr
    assert json.loads(arrays(tmp_path / "begun.npz")["options"])["openings"] == read_openings(openings).digest

    result = run(server, tmp_path / "new.npz", target_dir, "--questions", str(questions))
    assert (result.exit_code, "--conversations: 1000 are more than the 2" in result.stderr) == (1, True)
    result = run(server, tmp_path / "new.npz", target_dir, "--openings", str(tmp_path / "none.txt"))
    assert (result.exit_code, "--openings: " in result.stderr) == (1, True)
    both = ("--openings", str(openings), "--questions", str(questions))
    result = run(server, tmp_path / "new.npz", target_dir, *both)
    assert (result.exit_code, "--openings and --questions" in result.stderr) == (2, True)


@pytest.mark.parametrize("temperatures", ["", "warm", "0,,1", "0,-0.5", "0,nan", "inf"])
def test_temperatures_are_numbers_from_0_on(
    temperatures: str, server: ScriptedServer, target_dir: Path, tmp_path: Path
) -> None:
    result = run(server, tmp_path / "data.npz", target_dir, "--temperatures", temperatures)
    assert (result.exit_code, "--temperatures" in result.stderr) == (2, True)


def test_the_command_names_what_is_wrong(server: ScriptedServer, target_dir: Path, tmp_path: Path) -> None:
    result = run(server, save_data(tmp_path / "data.npz"), target_dir)
    assert (result.exit_code, "temperature is missing" in result.stderr) == (1, True)
    server.stop()
    result = run(server, tmp_path / "new.npz", target_dir)
    assert (result.exit_code, "UNAVAILABLE" in result.stderr) == (1, True)
