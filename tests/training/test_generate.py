"""Tests of `self-chat`: the requests that it sends to the model, and the file of conversations that it writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.errors import Unavailable
from baton.events import Completion, FinishReason, Usage
from common.errors import ConfigError
from common.telemetry.stats import Timings
from common.text.chat_messages import ChatMessage
from common.text.tokenizer import TextTokenizer
from tests.support.models import END_ID, SPECIAL_TOKENS, START_ID, VOCAB_SIZE
from tests.training.cases import QUESTION_LIMIT, arrays, quiet, save_data
from training.data import load_conversations
from training.generate import ANSWER_TEMPERATURES, SelfChat, read_openings, read_questions, write_self_chat


class Model:
    """A fake model whose answers follow from the request's seed. `asked` lists the requests, and `active` how many of
    them were running each time one began.
    """

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
        if request["max_tokens"] != QUESTION_LIMIT:
            return _completion((20 + request["seed"] % 50, END_ID), "", FinishReason.EOS)
        text = self._questions[min(len(self.asked), len(self._questions)) - 1]
        ended = FinishReason.LENGTH if text.endswith("...") else FinishReason.EOS
        token_ids = self._encoder.encode(text)
        return _completion(token_ids, self._encoder.decode(token_ids), ended)


def _completion(token_ids: Sequence[int], text: str, reason: FinishReason) -> Completion:
    return Completion(
        request_id="r",
        seed=0,
        text=text,
        token_ids=tuple(token_ids),
        prompt_logprobs=(),
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


def write(
    out: Path, model: Any, encoder: TextTokenizer, num_conversations: int, *, concurrency: int = 2, **changes: Any
) -> int:
    """Writes conversations to `out`. `changes` override the options of SelfChat."""
    self_chat = SelfChat(model, encoder, **{"model_digest": "theirs", "seed": 3, "max_answer_tokens": 40, **changes})
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


def test_a_question_is_sampled_from_the_user_s_opening_and_answered_in_its_template(
    encoder: TextTokenizer, tmp_path: Path
) -> None:
    model = Model(encoder, [" How? "])
    write(tmp_path / "data.npz", model, encoder, 1)
    question, answer = model.asked
    assert encoder.decode(question["token_ids"]) == "user\n"
    assert (question["temperature"], question["top_p"], question["max_tokens"]) == (1.0, 0.95, QUESTION_LIMIT)
    assert answer["token_ids"] == encoder.encode_chat([ChatMessage("user", "How?")])
    assert answer["max_tokens"] == 40 and question["seed"] != answer["seed"]


def test_questions_that_are_empty_or_do_not_end_are_sampled_again(encoder: TextTokenizer, tmp_path: Path) -> None:
    model = Model(encoder, ["", " \n", "on and on...", "How?"])
    write(tmp_path / "data.npz", model, encoder, 1)
    assert len({request["seed"] for request in model.asked[:4]}) == 4
    assert model.asked[4]["token_ids"] == encoder.encode_chat([ChatMessage("user", "How?")])
    with pytest.raises(ConfigError, match="20 sampled questions were empty"):
        write(tmp_path / "none.npz", Model(encoder, [""]), encoder, 1)
    assert not (tmp_path / "none.npz").exists()


@pytest.mark.parametrize("options", [{}, {"temperatures": (0.0, 0.5, 2.0)}], ids=["default", "temperatures"])
def test_the_file_is_what_training_reads(options: dict[str, Any], encoder: TextTokenizer, tmp_path: Path) -> None:
    model = Model(encoder)
    write(tmp_path / "data.npz", model, encoder, 40, **options)
    conversations = load_conversations(tmp_path / "data.npz", vocab_size=VOCAB_SIZE)
    prompt = encoder.encode_chat([ChatMessage("user", "How?")])
    assert set(conversations.answer_start.tolist()) == {len(prompt)}
    for start, stop in zip(conversations.offsets[:-1], conversations.offsets[1:], strict=True):
        tokens = conversations.tokens[start:stop].tolist()
        assert (tuple(tokens[: len(prompt)]), tokens[-1]) == (prompt, END_ID)
    stored = arrays(tmp_path / "data.npz")["temperature"]
    assert {round(value, 1) for value in stored} == set(options.get("temperatures", ANSWER_TEMPERATURES))
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


def test_what_was_made_before_a_failure_is_kept(encoder: TextTokenizer, tmp_path: Path) -> None:
    write(tmp_path / "whole.npz", Model(encoder), encoder, 12)
    model = Model(encoder)
    model.fails_from = 11
    with pytest.raises(Unavailable):
        write(tmp_path / "data.npz", model, encoder, 12)
    kept, whole = arrays(tmp_path / "data.npz"), arrays(tmp_path / "whole.npz")
    assert 0 < len(kept["answer_start"]) < 12
    assert kept["tokens"] == whole["tokens"][: len(kept["tokens"])]


def test_what_was_made_is_saved_now_and_then(encoder: TextTokenizer, tmp_path: Path) -> None:
    out, is_saved = tmp_path / "data.npz", list[bool]()

    class Watching(Model):
        async def complete(self, **request: Any) -> Completion:
            is_saved.append(out.exists())
            return await super().complete(**request)

    write(out, Watching(encoder), encoder, 60, concurrency=1)
    assert not is_saved[2 * 49] and is_saved[-1], "each conversation takes two requests"


def test_no_more_run_at_a_time_than_asked_for(encoder: TextTokenizer, tmp_path: Path) -> None:
    model = Model(encoder)
    write(tmp_path / "data.npz", model, encoder, 30, concurrency=4)
    assert model.most_active == 4


def test_a_file_of_another_format_is_not_written_over(encoder: TextTokenizer, tmp_path: Path) -> None:
    path = save_data(tmp_path / "data.npz")
    with pytest.raises(ConfigError, match="temperature is missing"):
        write(path, Model(encoder), encoder, 4)
    assert "temperature" not in arrays(path)


def test_by_default_it_draws_what_it_always_drew(encoder: TextTokenizer, tmp_path: Path) -> None:
    """Otherwise files that were begun by earlier versions could not be continued."""
    model = Model(encoder)
    write(tmp_path / "data.npz", model, encoder, 2, concurrency=1)
    assert [(request["temperature"], request["seed"]) for request in model.asked] == [
        (1.0, 789974133212406140),
        (0.0, 7390452496230446619),
        (1.0, 2335847356491536649),
        (0.8, 3148560210468381428),
    ]


def test_a_question_goes_on_from_an_opening(encoder: TextTokenizer, tmp_path: Path) -> None:
    (tmp_path / "openings.txt").write_bytes("Write a\n \n  Who is \r\nWarum hört\n".encode())
    openings = read_openings(tmp_path / "openings.txt")
    assert openings.lines == ("Write a", "Who is", "Warum hört")
    model = Model(encoder, [" poem. "])
    write(tmp_path / "data.npz", model, encoder, 20, concurrency=1, source=openings)
    write(tmp_path / "alone.npz", without := Model(encoder), encoder, 1)
    alone, drawn = without.asked[0]["token_ids"], set()
    for question, answer in zip(model.asked[::2], model.asked[1::2], strict=True):
        line = encoder.decode(question["token_ids"]).removeprefix("user\n")
        drawn.add(line)
        assert question["token_ids"] == alone + encoder.encode(line)
        assert (question["temperature"], question["max_tokens"]) == (1.0, QUESTION_LIMIT)
        assert answer["token_ids"] == encoder.encode_chat([ChatMessage("user", f"{line} poem.")])
    assert drawn == set(openings.lines)


class WithStart(TextTokenizer):
    """A tokenizer like sentencepiece's: it adds a start token, and decoding drops the first space."""

    def encode(self, text: str) -> tuple[int, ...]:
        return (START_ID, *super().encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return super().decode(token_ids).removeprefix(" ")


def test_an_opening_is_followed_as_the_model_reads_it(encoder: TextTokenizer, target_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "openings.txt").write_text("Write a")
    openings = read_openings(tmp_path / "openings.txt")
    other = WithStart.from_directory(target_dir)
    model = Model(other, [" poem."])
    write(tmp_path / "data.npz", model, other, 1, source=openings)
    question, answer = model.asked
    write(tmp_path / "alone.npz", without := Model(encoder), encoder, 1)
    assert question["token_ids"] == without.asked[0]["token_ids"] + encoder.encode("Write a")
    assert answer["token_ids"] == encoder.encode_chat([ChatMessage("user", "Write a poem.")])


def test_openings_that_cannot_be_used_are_refused(encoder: TextTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "openings.txt"
    with pytest.raises(ConfigError, match=r"^--openings: .*openings\.txt: no text to read"):
        read_openings(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"^--openings: .*openings\.txt: no text to read"):
        read_openings(path)
    path.write_text(" \n\n")
    with pytest.raises(ConfigError, match=r"^--openings: .*: every line is blank"):
        read_openings(path)
    path.write_text(f"Write\n{SPECIAL_TOKENS[END_ID]} Write\n")
    with pytest.raises(ConfigError, match=r"^--openings: .* Write' holds special tokens"):
        write(tmp_path / "data.npz", Model(encoder), encoder, 1, source=read_openings(path))


def test_questions_that_hold_special_tokens_are_refused(encoder: TextTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question": f"Why?{SPECIAL_TOKENS[END_ID]}"}))
    with pytest.raises(ConfigError, match=r"^--questions: .* holds special tokens"):
        write(tmp_path / "data.npz", Model(encoder), encoder, 1, source=read_questions(path))


def test_questions_of_a_file_are_answered_in_order(encoder: TextTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    asked = ["Why?", "def f():\n    pass", "Où\u2028?"]
    path.write_text("\n\n".join(json.dumps({"id": 1, "question": each}, ensure_ascii=False) for each in asked))
    questions = read_questions(path)
    assert questions.texts == tuple(asked)
    model = Model(encoder)
    write(tmp_path / "data.npz", model, encoder, 3, source=questions)
    assert [request["max_tokens"] for request in model.asked] == [40] * 3
    conversations = load_conversations(tmp_path / "data.npz", vocab_size=VOCAB_SIZE)
    for number, question in enumerate(asked):
        start = conversations.offsets[number]
        prompt = conversations.tokens[start : start + conversations.answer_start[number]]
        assert tuple(prompt.tolist()) == encoder.encode_chat([ChatMessage("user", question)])
    again = Model(encoder)
    with pytest.raises(ConfigError, match=r"^--conversations: 4 are more than the 3 of --questions"):
        write(tmp_path / "data.npz", again, encoder, 4, source=questions)
    assert not again.asked


@pytest.mark.parametrize("line", ["what?", '"question"', "[]", "{}", '{"question": 3}', '{"question": " "}'])
def test_a_line_without_a_question_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(f'{{"question": "Why?"}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=r"^--questions: .*\.jsonl: line 3 is no object"):
        read_questions(path)
    with pytest.raises(ConfigError, match=r"^--questions: .*: no text to read"):
        read_questions(tmp_path)


def test_a_file_is_continued_with_the_options_it_was_begun_with(encoder: TextTokenizer, tmp_path: Path) -> None:
    out = tmp_path / "data.npz"
    (tmp_path / "questions.jsonl").write_text('{"question": "Why?"}\n' * 3)
    (tmp_path / "openings.txt").write_text("Write")
    (tmp_path / "other.txt").write_text("Say")
    openings, other = read_openings(tmp_path / "openings.txt"), read_openings(tmp_path / "other.txt")
    write(out, Model(encoder), encoder, 2, source=openings)
    with np.load(out, allow_pickle=False) as file:
        assert json.loads(file["options"].item()) == {
            "model": "theirs",
            "seed": 3,
            "max_answer_tokens": 40,
            "temperatures": [0.0, 0.5, 0.8, 1.0],
            "openings": openings.digest,
            "questions": None,
        }
    before = out.read_bytes()
    changes: list[tuple[str, dict[str, Any]]] = [
        ("model: this run has another, .*data.npz was begun with theirs", {"model_digest": "another"}),
        ("seed: this run has 4, .*data.npz was begun with 3", {"seed": 4}),
        ("max_answer_tokens: this run has 41", {"max_answer_tokens": 41, "temperatures": (0.0,)}),
        (r"temperatures: this run has \[0.0\]", {"temperatures": (0.0,)}),
        ("openings: this run has None", {"source": None}),
        (f"openings: this run has {other.digest}", {"source": other}),
        ("openings", {"source": read_questions(tmp_path / "questions.jsonl")}),
    ]
    for message, change in changes:
        with pytest.raises(ConfigError, match=f"^{message}"):
            write(out, Model(encoder), encoder, 3, **{"source": openings, **change})
    assert out.read_bytes() == before
    assert write(out, Model(encoder), encoder, 3, source=openings) == 2
    write(tmp_path / "asked.npz", Model(encoder), encoder, 1, source=read_questions(tmp_path / "questions.jsonl"))
    with pytest.raises(ConfigError, match=r"^questions: this run has None"):
        write(tmp_path / "asked.npz", Model(encoder), encoder, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (None, "the array options is missing: it cannot be told how"),
        (np.array("no JSON"), "options is no JSON object: it cannot be told how"),
        (np.array("3"), "options is no JSON object"),
        (np.arange(3), "options is no JSON object"),
        (np.array('{"top_k": 3}'), "model: this run has theirs, .* was begun with None"),
        (
            np.array(
                '{"model": "theirs", "seed": 3, "max_answer_tokens": 40, "temperatures": [0.0, 0.5, 0.8, 1.0], '
                '"openings": null, "questions": null, "top_k": 5}'
            ),
            "top_k: this run has None, .* was begun with 5",
        ),
    ],
)
def test_a_file_that_was_begun_elsewhere_is_not_continued(
    options: Any, message: str, encoder: TextTokenizer, tmp_path: Path
) -> None:
    path = save_data(tmp_path / "data.npz", temperature=np.zeros(3), options=options)
    with pytest.raises(ConfigError, match=message):
        write(path, Model(encoder), encoder, 4)


def test_a_model_without_a_chat_template_is_refused(encoder: TextTokenizer) -> None:
    class Without:
        def encode_chat(self, messages: object) -> tuple[int, ...]:
            raise ValueError("the model has no chat template")

    with pytest.raises(ConfigError, match="model: the model has no chat template"):
        SelfChat(Model(encoder), Without(), model_digest="", seed=0, max_answer_tokens=9)  # type: ignore[arg-type]
