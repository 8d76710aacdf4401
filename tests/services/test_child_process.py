"""Tests that child processes end with the process that starts them."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from common.host.child_process import Child
from tests.support.open_files import open_files

BOUND_S = 60.0
BUSY = "print(flush=True)\nimport re; re.match('(a+)+$', 'a' * 60 + 'b')"
"""A program that keeps the interpreter's lock, so that no code of its own could end it."""
PARENT = f"""
import subprocess, sys
from common.host.child_process import Child
child = Child([sys.executable, "-c", {BUSY!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""


def test_a_busy_child_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(BOUND_S)


def test_a_child_that_cannot_be_started_leaves_nothing_open() -> None:
    before = open_files()
    with pytest.raises(OSError, match="no-program"):
        Child(["/no-program"])
    assert open_files() <= before
