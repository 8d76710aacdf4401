"""Tests of name look-ups, which may hang without blocking the service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from common.addresses import AddressFile, DnsName
from common.rpc.name_lookup import MAX_FILE_BYTES, LookedUpName, look_up, read_addresses

BOUND_S = 60.0


def test_a_look_up_that_hangs_keeps_no_loop_from_its_end() -> None:
    is_released, has_ended = threading.Event(), threading.Event()

    def hangs(host: str, port: int) -> Sequence[str]:
        is_released.wait(BOUND_S)
        has_ended.set()
        return ()

    async def ask() -> str:
        name = LookedUpName(name=DnsName("name", 1), look_up=hangs, timeout_s=0.01)
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

    name = LookedUpName(name=DnsName("name", 1), look_up=scripted, timeout_s=BOUND_S)
    seen = []
    for _ in range(3):
        await name.refresh()
        seen.append((name.found, name.error))
    assert seen == [
        (("10.0.0.1:1",), ""),
        (("10.0.0.1:1",), "not found: no such name"),
        (("10.0.0.2:1",), ""),
    ]


def test_a_file_lists_addresses_once_each_in_its_order(tmp_path: Path) -> None:
    (file := tmp_path / "decode").write_text("10.0.0.2:1\n\n 10.0.0.1:1 \n[0:0:0:0:0:0:0:1]:2\n10.0.0.2:1\n")
    assert read_addresses(file) == ("10.0.0.2:1", "10.0.0.1:1", "[::1]:2")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "lists no address"),
        ("\n", "lists no address"),
        ("10.0.0.1:1\n10.0.0.2:50", "its last line has no end"),
        ("10.0.0.1:1\nhost:2\n", "line 2: 'host:2' is not HOST:PORT with a numeric host"),
        ("10.0.0.1\n", "line 1: '10.0.0.1' is not HOST:PORT"),
        ("10.0.0.1:1\n" * (MAX_FILE_BYTES // 10), f"has more than {MAX_FILE_BYTES} bytes"),
    ],
)
def test_a_file_that_is_malformed_or_half_written_gives_no_addresses(tmp_path: Path, content: str, why: str) -> None:
    (file := tmp_path / "decode").write_text(content)
    with pytest.raises(OSError, match=why):
        read_addresses(file)


async def test_a_file_is_read_again_and_what_it_listed_stays_while_it_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "decode"
    name = LookedUpName(name=AddressFile(str(file)), look_up=look_up, timeout_s=BOUND_S)
    seen = []
    for content in ("10.0.0.1:1\n", None, "10.0.0.2:1\n10.0.0.1:1\n"):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
        await name.refresh()
        seen.append((name.found, name.error.partition(": [")[0]))
    assert seen == [
        (("10.0.0.1:1",), ""),
        (("10.0.0.1:1",), "not found"),
        (("10.0.0.2:1", "10.0.0.1:1"), ""),
    ]
