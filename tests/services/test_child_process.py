"""Tests that child processes end with the process that starts them, and that both kinds of ends speak one protocol."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import subprocess
import sys
from multiprocessing.connection import Connection

import psutil
import pytest

from common.host.child_process import Child
from common.host.link import Link
from tests.support.open_files import open_files

BOUND_S = 60.0
BUSY = "import re\nprint(flush=True)\nre.match('(a+)+$', 'a' * 60 + 'b')"
"""A program that keeps the interpreter's lock, so that no code of its own could end it."""
PARENT = f"""
import subprocess, sys
from common.host.child_process import Child
from common.host.link import Link
child = Child([sys.executable, "-c", {BUSY!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


FORKING_PARENT = PARENT.replace(
    "child.wait()", "import os, time\nos.write(1, b'%d\\n' % (os.fork() or os.getpid()))\ntime.sleep(60)"
)
"""Both processes write their line in one piece: in Python's unbuffered mode `print` writes the line's end apart."""


def test_a_busy_child_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(BOUND_S)


def test_a_process_that_the_parent_forked_does_not_keep_its_children() -> None:
    with subprocess.Popen([sys.executable, "-c", FORKING_PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child, forked, same = (psutil.Process(int(parent.stdout.readline())) for _ in range(3))
        assert forked == same and child.status() == psutil.STATUS_RUNNING
        parent.kill()
        child.wait(BOUND_S)
        forked.kill()


def test_a_start_that_is_broken_off_leaves_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[psutil.Process] = []

    def interrupted(file: int, command: int, argument: int) -> None:
        if command == fcntl.F_SETOWN:
            started.append(psutil.Process(argument))
            raise KeyboardInterrupt

    monkeypatch.setattr(fcntl, "fcntl", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Child([sys.executable, "-c", BUSY])
    assert not started[0].is_running()


def test_a_child_that_cannot_be_started_leaves_nothing_open() -> None:
    before = open_files()
    with pytest.raises(OSError, match="no-program"):
        Child(["/no-program"])
    assert open_files() <= before


@pytest.mark.parametrize("num_bytes", [0, 1, 1 << 14, (1 << 14) + 1, 1 << 22])
async def test_a_link_and_a_connection_understand_each_other(num_bytes: int) -> None:
    ours, theirs = socket.socketpair()
    link, message = await Link.on(ours), bytes(range(256)) * (num_bytes >> 8) + b"x" * (num_bytes % 256)
    with Connection(theirs.detach()) as connection:
        link.send_bytes(message)
        assert await asyncio.to_thread(connection.recv_bytes) == message
        _, answer = await asyncio.gather(asyncio.to_thread(connection.send_bytes, message), link.receive_bytes())
    assert answer == message
    with pytest.raises(EOFError):
        await link.receive_bytes()
    link.close()
