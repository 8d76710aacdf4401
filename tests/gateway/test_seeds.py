"""Tests that the same seed gives the same choices, and that each choice of a request draws its own tokens."""

from __future__ import annotations

from typing import Any

from baton import Client
from tests.gateway.callers import Caller

OPTIONS: dict[str, Any] = {"prompt": "the other", "max_tokens": 24, "temperature": 1.0}
IDS = {"return_token_ids": True, "ignore_eos": True}


async def ids_of(caller: Caller, **options: Any) -> list[list[int]]:
    answer = await caller.complete(**OPTIONS, **options, extra_body=IDS)
    return [choice.token_ids for choice in answer.choices]


async def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(caller: Caller, pair: Client) -> None:
    first = await ids_of(caller, seed=7)
    assert await ids_of(caller, seed=7) == first
    assert await ids_of(caller, seed=8) != first
    assert first == [list(pair.complete("the other", seed=7, max_tokens=24, ignore_eos=True).token_ids)]


async def test_a_negative_seed_is_a_seed(caller: Caller, pair: Client) -> None:
    expected = pair.complete("the other", seed=2**64 - 3, max_tokens=24, ignore_eos=True)
    assert await ids_of(caller, seed=-3) == [list(expected.token_ids)]


async def test_without_a_seed_each_answer_is_another(caller: Caller) -> None:
    assert await ids_of(caller) != await ids_of(caller)


async def test_the_choices_of_a_seed_differ_and_come_again(caller: Caller) -> None:
    choices = await ids_of(caller, seed=7, n=4)
    assert len({tuple(ids) for ids in choices}) == 4
    assert await ids_of(caller, seed=7, n=4) == choices
    assert await ids_of(caller, seed=7) == choices[:1]


async def test_the_choices_without_a_seed_differ(caller: Caller) -> None:
    assert len({tuple(ids) for ids in await ids_of(caller, n=4)}) == 4
