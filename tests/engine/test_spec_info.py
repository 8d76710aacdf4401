"""Tests of SpecInfo's numbers for each kind of speculation, and of the settings they come from."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from common.config.settings import DecodeSettings
from common.errors import StartupError
from decode_service.main import speculation_of
from decode_service.schedule.config import DecodeConfig
from decode_service.speculate.spec_info import SpecInfo, num_drafted


@pytest.mark.parametrize(
    ("spec_info", "num_verify_tokens", "max_accept_len", "num_slots"),
    [
        (SpecInfo.chain(0), 1, 1, 1),
        (SpecInfo.chain(1), 2, 2, 2),
        (SpecInfo.chain(4), 5, 5, 5),
        (SpecInfo(num_steps=3, num_draft_tokens=15, topk=4), 16, 4, 16),
        (SpecInfo(num_steps=5, num_draft_tokens=6, topk=4), 7, 6, 16),  # it drafts in more slots than it verifies in
    ],
)
def test_figures(spec_info: SpecInfo, num_verify_tokens: int, max_accept_len: int, num_slots: int) -> None:
    figures = (spec_info.num_verify_tokens, spec_info.max_accept_len, spec_info.num_slots)
    assert figures == (num_verify_tokens, max_accept_len, num_slots)


def test_a_tree_drafts_topk_and_then_topk_of_each_of_the_topk_best() -> None:
    assert [num_drafted(num_steps, 3) for num_steps in range(4)] == [0, 3, 12, 21]


@pytest.mark.parametrize(
    "figures",
    [
        {"num_steps": 2, "num_draft_tokens": 3},
        {"num_steps": 3, "num_draft_tokens": 2, "topk": 2},
        {"num_steps": 2, "num_draft_tokens": 7, "topk": 2},
    ],
)
def test_figures_that_contradict_each_other_are_refused(figures: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        SpecInfo(**figures)


# ---- settings ----------------------------------------------------------------------------------------------------


def speculation(*, num_layers: int = 1, **values: Any) -> SpecInfo:
    head: Any = SimpleNamespace(layer_group=SimpleNamespace(num_layers=num_layers))
    return speculation_of(DecodeSettings(draft="head", **values), head)


def test_settings_say_how_to_draft() -> None:
    assert speculation() == SpecInfo.chain(4)
    assert speculation(num_draft_tokens=2) == speculation(num_draft_steps=2) == SpecInfo.chain(2)
    assert speculation(num_draft_tokens=3, num_draft_steps=3) == SpecInfo.chain(3)
    tree = speculation(draft_topk=4, num_draft_steps=3, num_draft_tokens=15)
    assert tree == SpecInfo(num_steps=3, num_draft_tokens=15, topk=4)


@pytest.mark.parametrize(("max_rows", "max_lag"), [(1, 128), (32, 128), (256, 16), (10_000, 1)])
def test_a_head_that_was_left_behind_has_no_more_than_4096_tokens_to_read_or_one_a_row(
    max_rows: int, max_lag: int
) -> None:
    assert max_rows * max_lag <= max(4096, max_rows)
    assert DecodeConfig().max_unread(max_rows) == max_lag


def test_a_head_of_several_layers_drafts_one_token_with_each() -> None:
    assert speculation(num_layers=3) == replace(SpecInfo.chain(3), reads_drafts=False)
    assert speculation(num_layers=7) == replace(SpecInfo.chain(4), reads_drafts=False)
    assert speculation(num_layers=3, num_draft_tokens=2) == replace(SpecInfo.chain(2), reads_drafts=False)


@pytest.mark.parametrize(
    ("num_layers", "values", "named"),
    [
        (1, {"num_draft_tokens": 3, "num_draft_steps": 2}, "^num_draft_steps: in a chain"),
        (3, {"num_draft_tokens": 4}, "^num_draft_tokens: 4, but the head has 3 layers"),
        (3, {"num_draft_steps": 4}, "^num_draft_steps: 4, but the head has 3 layers"),
        (1, {"draft_topk": 2}, "^draft_topk: a tree needs"),
        (1, {"draft_topk": 2, "num_draft_steps": 2}, "^draft_topk: a tree needs"),
        (1, {"draft_topk": 2, "num_draft_tokens": 2}, "^draft_topk: a tree needs"),
        (1, {"draft_topk": 2, "num_draft_steps": 3, "num_draft_tokens": 2}, "^num_draft_tokens: 2 of a tree"),
        (
            1,
            {"draft_topk": 2, "num_draft_steps": 2, "num_draft_tokens": 7},
            "^num_draft_tokens: 7 of a tree .* 6 drafts",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused_by_name(
    num_layers: int, values: dict[str, int], named: str
) -> None:
    with pytest.raises(StartupError, match=named):
        speculation(num_layers=num_layers, **values)
