"""Conversations of a model with itself: what is asked of it, and the file they are put in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from baton.cli.main import app
from baton.errors import Unavailable
from baton.events import Completion, FinishReason, Timings, Usage
from baton.v1 import inference_pb2
from common.errors import ConfigError
from common.tokenizer import TextTokenizer
from tests.client.scripted_inference import ScriptedServer, delta, finished, started
from tests.support.models import END_ID, VOCAB_SIZE
from tests.training.cases import quiet, save_data
from training import generate
from training.data import load_conversations
from training.generate import ANSWER_TEMPERATURES, SelfChat, write_self_chat

_QUESTION_LIMIT = 128


class Model:
    """Answers with tokens that follow from the request's seed. `asked` are the requests, `active` those at a time."""

    def __init__(self, encoder: TextTokenizer, questions: Sequence[str] = ("How?",)) -> None:
        self._encoder = encoder
        self._questions = questions
        self.asked: list[dict[str, Any]] = []
        self.active = self.most_active = 0
        self.fails_from = 10**9

    async def complete(self, **request: Any) -> Completion:
        self.asked.append(request)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        for _ in range(request["seed"] % 5):
            await asyncio.sleep(0)
        self.active -= 1
        if len(self.asked) > self.fails_from:
            raise Unavailable("gone")
        if request["max_tokens"] != _QUESTION_LIMIT:
            return _completion((20 + request["seed"] % 50, END_ID), "", FinishReason.EOS)
        text = self._questions[min(len(self.asked), len(self._questions)) - 1]
        ended = FinishReason.LENGTH if text.endswith("...") else FinishReason.EOS
        return _completion(self._encoder.encode(text), text, ended)


def _completion(token_ids: Sequence[int], text: str, reason: FinishReason) -> Completion:
    return Completion(
        request_id="r",
        seed=0,
        text=text,
        token_ids=tuple(token_ids),
        logprobs=(),
        finish_reason=reason,
        matched_stop=None,
        usage=Usage(1, len(token_ids)),
        timings=Timings(0, 0, 0, 0, 0, 0, 1, 0),
        speculation=None,
    )


@pytest.fixture(scope="module")
def encoder(target_dir: Path) -> TextTokenizer:
    return TextTokenizer.from_directory(target_dir)


def write(out: Path, model: Any, encoder: TextTokenizer, num_conversations: int, *, concurrency: int = 2) -> int:
    self_chat = SelfChat(model, encoder, seed=3, max_answer_tokens=40)
    return asyncio.run(
        write_self_chat(
            out,
            self_chat,
            num_conversations=num_conversations,
            vocab_size=VOCAB_SIZE,
            concurrency=concurrency,
            progress=quiet(),
        )
    )


def arrays(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return {name: file[name].tolist() for name in file.files}


def test_a_question_is_sampled_from_the_user_s_opening_and_answered_in_its_template(
    encoder: TextTokenizer, tmp_path: Path
) -> None:
    model = Model(encoder, [" How? "])
    write(tmp_path / "data.npz", model, encoder, 1)
    question, answer = model.asked
    assert encoder.decode(question["token_ids"]) == "user\n"
    assert (question["temperature"], question["top_p"], question["max_tokens"]) == (1.0, 0.95, _QUESTION_LIMIT)
    assert answer["token_ids"] == encoder.encode_chat([("user", "How?")])
    assert answer["max_tokens"] == 40 and question["seed"] != answer["seed"]


def test_questions_that_are_empty_or_do_not_end_are_sampled_again(encoder: TextTokenizer, tmp_path: Path) -> None:
    model = Model(encoder, ["", " \n", "on and on...", "How?"])
    write(tmp_path / "data.npz", model, encoder, 1)
    assert len({request["seed"] for request in model.asked[:4]}) == 4
    assert model.asked[4]["token_ids"] == encoder.encode_chat([("user", "How?")])
    with pytest.raises(ConfigError, match="20 sampled questions were empty"):
        write(tmp_path / "none.npz", Model(encoder, [""]), encoder, 1)
    assert not (tmp_path / "none.npz").exists()


def test_the_file_is_what_training_reads(encoder: TextTokenizer, tmp_path: Path) -> None:
    model = Model(encoder)
    write(tmp_path / "data.npz", model, encoder, 40)
    conversations = load_conversations(tmp_path / "data.npz", vocab_size=VOCAB_SIZE)
    prompt = encoder.encode_chat([("user", "How?")])
    assert set(conversations.answer_start.tolist()) == {len(prompt)}
    for start, stop in zip(conversations.offsets[:-1], conversations.offsets[1:], strict=True):
        tokens = conversations.tokens[start:stop].tolist()
        assert (tuple(tokens[: len(prompt)]), tokens[-1]) == (prompt, END_ID)
    stored = arrays(tmp_path / "data.npz")["temperature"]
    assert {round(value, 1) for value in stored} == set(ANSWER_TEMPERATURES)
    for request in model.asked:
        assert (request["top_p"] is None) == (request["temperature"] == 0)
    with np.load(tmp_path / "data.npz") as file:
        assert file["tokens"].dtype == np.uint16


def test_a_file_that_was_begun_is_continued_as_if_never_left(encoder: TextTokenizer, tmp_path: Path) -> None:
    write(tmp_path / "whole.npz", Model(encoder), encoder, 12, concurrency=5)
    assert write(tmp_path / "data.npz", Model(encoder), encoder, 7) == 0
    assert write(tmp_path / "data.npz", Model(encoder), encoder, 12) == 7
    assert arrays(tmp_path / "data.npz") == arrays(tmp_path / "whole.npz")
    model = Model(encoder)
    assert write(tmp_path / "data.npz", model, encoder, 12) == 12
    assert not model.asked


def test_what_was_made_before_a_failure_is_kept(
    encoder: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "whole.npz", Model(encoder), encoder, 12)
    model = Model(encoder)
    model.fails_from = 11
    with pytest.raises(Unavailable):
        write(tmp_path / "data.npz", model, encoder, 12)
    kept, whole = arrays(tmp_path / "data.npz"), arrays(tmp_path / "whole.npz")
    assert 0 < len(kept["answer_start"]) < 12
    assert kept["tokens"] == whole["tokens"][: len(kept["tokens"])]

    monkeypatch.setattr(generate, "_SAVE_EVERY", 5)
    written = []
    monkeypatch.setattr(generate, "_write", lambda path, made, _: written.append(len(made)))
    write(tmp_path / "often.npz", Model(encoder), encoder, 12)
    assert written == [5, 10, 12]


def test_no_more_run_at_a_time_than_asked_for(encoder: TextTokenizer, tmp_path: Path) -> None:
    model = Model(encoder)
    write(tmp_path / "data.npz", model, encoder, 30, concurrency=4)
    assert model.most_active == 4


def test_a_file_of_another_format_is_not_written_over(encoder: TextTokenizer, tmp_path: Path) -> None:
    path = save_data(tmp_path / "data.npz")
    with pytest.raises(ConfigError, match="temperature is missing"):
        write(path, Model(encoder), encoder, 4)
    assert "temperature" not in arrays(path)


def test_a_model_without_a_chat_template_is_refused(encoder: TextTokenizer) -> None:
    class Without:
        def encode_chat(self, messages: object) -> tuple[int, ...]:
            raise ValueError("the model has no chat template")

    with pytest.raises(ConfigError, match="model: the model has no chat template"):
        SelfChat(Model(encoder), Without(), seed=0, max_answer_tokens=9)  # type: ignore[arg-type]


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    ended = finished(inference_pb2.FINISH_REASON_EOS, num_completion_tokens=2)
    server.inference.script = [started(), delta([40, END_ID], "How?"), ended]
    yield server
    server.stop()


def run(server: ScriptedServer, out: Path, model: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["self-chat", server.address, "--out", str(out), "--model", str(model), *options])


def test_the_command_writes_the_file(server: ScriptedServer, target_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "data.npz"
    result = run(server, out, target_dir, "--conversations", "3", "--max-answer-tokens", "9")
    assert (result.exit_code, "3 conversations added to 0" in result.stderr) == (0, True), result.stderr
    assert len(arrays(out)["answer_start"]) == 3
    assert {server.inference.requests.get_nowait().sampling.max_tokens for _ in range(6)} == {_QUESTION_LIMIT, 9}
    result = run(server, out, target_dir, "--conversations", "4")
    assert "1 conversations added to 3" in result.stderr


def test_the_command_names_what_is_wrong(server: ScriptedServer, target_dir: Path, tmp_path: Path) -> None:
    result = run(server, save_data(tmp_path / "data.npz"), target_dir)
    assert (result.exit_code, "temperature is missing" in result.stderr) == (1, True)
    server.stop()
    result = run(server, tmp_path / "new.npz", target_dir)
    assert (result.exit_code, "UNAVAILABLE" in result.stderr) == (1, True)
