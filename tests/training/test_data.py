"""Tests of loading conversations from a file, and of every way in which a file can be wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError
from tests.training.cases import save_data
from training.data import join, load_conversations, split


def test_conversations_are_read_as_they_lie(tmp_path: Path) -> None:
    conversations = load_conversations(save_data(tmp_path / "data.npz"), vocab_size=15)
    assert conversations.lengths.tolist() == [4, 5, 6]
    assert conversations.answer_tokens(np.array([2, 0])).tolist() == [12, 13, 14, 1, 2, 3]
    assert conversations.num_answer_tokens(np.array([2, 0])) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": None}, "the array tokens is missing"),
        ({"offsets": None}, "the array offsets is missing"),
        ({"answer_start": None}, "the array answer_start is missing"),
        ({"tokens": np.arange(15.0)}, r"tokens is float64 \[15\], not integers"),
        ({"answer_start": np.ones((3, 1), dtype=np.int32)}, r"answer_start is int32 \[3, 1\], not integers"),
        ({"tokens": np.full(15, 99)}, "tokens: 99 is outside the target's vocabulary of 15"),
        ({"tokens": np.full(15, -1)}, "tokens: -1 is outside"),
        ({"offsets": np.array([0])}, "offsets: there is no conversation"),
        ({"offsets": np.array([1, 4, 9, 15])}, "offsets: begin at 1, not at 0"),
        ({"offsets": np.array([0, 9, 4, 15])}, "offsets: not strictly ascending"),
        ({"offsets": np.array([0, 4, 4, 15])}, "offsets: not strictly ascending"),
        ({"offsets": np.array([0, 4, 9, 14])}, "offsets: end at 14, there are 15 tokens"),
        ({"answer_start": np.array([1, 2])}, "answer_start: 2 values for 3 conversations"),
        ({"answer_start": np.array([1, 5, 3])}, "answer_start: outside conversation 1"),
        ({"answer_start": np.array([1, 2, 0])}, "answer_start: outside conversation 2, or at its first token"),
    ],
)
def test_a_wrong_array_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_conversations(save_data(tmp_path / "data.npz", **changes), vocab_size=15)


def test_a_file_that_is_no_npz_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"no archive"):
        (tmp_path / "data.npz").write_bytes(content)
        with pytest.raises(ConfigError, match=r"no \.npz file to read"):
            load_conversations(tmp_path / "data.npz", vocab_size=15)
    with pytest.raises(ConfigError, match=r"none\.npz: no"):
        load_conversations(tmp_path / "none.npz", vocab_size=15)


def test_files_are_put_end_to_end_in_their_order(tmp_path: Path) -> None:
    first = load_conversations(save_data(tmp_path / "first.npz"), vocab_size=15)
    second = load_conversations(
        save_data(
            tmp_path / "second.npz",
            tokens=np.array([7, 8, 9]),
            offsets=np.array([0, 3]),
            answer_start=np.array([2]),
        ),
        vocab_size=15,
    )
    both = join([second, first])
    assert both.tokens.tolist() == [7, 8, 9, *range(15)]
    assert both.offsets.tolist() == [0, 3, 7, 12, 18]
    assert both.answer_start.tolist() == [2, 1, 2, 3]
    assert both.answer_tokens(np.array([0, 1])).tolist() == [9, 1, 2, 3]
    assert join([first, second]).digest != both.digest


def test_one_file_has_the_digest_that_it_always_had(tmp_path: Path) -> None:
    """A changed digest would invalidate features that users have computed."""
    only = load_conversations(save_data(tmp_path / "data.npz"), vocab_size=15)
    assert join([only]).digest == only.digest == "b3cfe59a346746e898438cf41bd9ec74"


def test_what_is_held_out_of_a_file_depends_on_the_seed(tmp_path: Path) -> None:
    parts = [load_conversations(save_data(tmp_path / "data.npz"), vocab_size=15)]
    train, held_out = split(parts, ["data.npz"], num_held_out=1, seed=0)
    assert sorted([*train, *held_out]) == [0, 1, 2] and len(held_out) == 1
    assert {split(parts, ["data.npz"], num_held_out=1, seed=seed)[1].item() for seed in range(20)} == {0, 1, 2}
    with pytest.raises(ConfigError, match=r"num_held_out: 3 of 3 conversations leave none of data\.npz to train on"):
        split(parts, ["data.npz"], num_held_out=3, seed=0)


def test_another_file_does_not_change_what_is_held_out_of_the_first(tmp_path: Path) -> None:
    part = load_conversations(save_data(tmp_path / "data.npz"), vocab_size=15)
    for seed in range(5):
        (alone,) = split([part], ["one"], num_held_out=1, seed=seed)[1].tolist()
        train, held_out = split([part, part], ["one", "two"], num_held_out=1, seed=seed)
        assert held_out.tolist() == [alone, 3 + alone]
        assert sorted([*train, *held_out]) == [*range(6)]
