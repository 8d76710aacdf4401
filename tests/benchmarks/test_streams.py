"""Tests that the table of `benchmarks.streams` names the machine's cores, though its own process keeps to one."""

from __future__ import annotations

import os
import sys

import pytest

from benchmarks import machine, streams


def test_the_heading_counts_the_cores_of_the_machine_and_not_the_client_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usable = {0, 1, 2}

    def keep_to(process: int, cores: set[int]) -> None:
        usable.intersection_update(cores)

    monkeypatch.setattr(os, "sched_setaffinity", keep_to)
    monkeypatch.setattr(machine, "num_cores", lambda: len(usable))
    monkeypatch.setattr(sys, "argv", ["streams", "--edges", "--no-save"])  # no number of edges, so no run
    assert streams.main() == 0
    assert usable == {1} and ", 3 cores, " in capsys.readouterr().out
