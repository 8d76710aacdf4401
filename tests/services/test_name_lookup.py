"""Tests of name look-ups, which may hang without blocking the service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from common.rpc.name_lookup import LookedUpName

BOUND_S = 20.0


def test_a_look_up_that_hangs_keeps_no_loop_from_its_end() -> None:
    is_released, has_ended = threading.Event(), threading.Event()

    def hangs(host: str, port: int) -> Sequence[str]:
        is_released.wait(BOUND_S)
        has_ended.set()
        return ()

    async def ask() -> str:
        name = LookedUpName(host="name", port=1, look_up=hangs, timeout_s=0.01)
        await name.refresh()
        return name.error

    error = asyncio.run(ask())  # joins the threads of the loop's own pool
    assert not has_ended.is_set()
    assert error == "not found: no answer within 0.01 s"
    is_released.set()
    assert has_ended.wait(BOUND_S), "what it found is told to nobody"


async def test_what_was_found_stays_while_look_ups_fail_and_the_error_goes_with_the_next_success() -> None:
    answers: list[Sequence[str] | Exception] = [["10.0.0.1:1"], OSError("no such name"), ["10.0.0.2:1"]]

    def scripted(host: str, port: int) -> Sequence[str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    name = LookedUpName(host="name", port=1, look_up=scripted, timeout_s=BOUND_S)
    seen = []
    for _ in range(3):
        await name.refresh()
        seen.append((name.found, name.error))
    assert seen == [
        (("10.0.0.1:1",), ""),
        (("10.0.0.1:1",), "not found: no such name"),
        (("10.0.0.2:1",), ""),
    ]
