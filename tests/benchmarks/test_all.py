"""Tests that `make bench` runs every benchmark even if an earlier one failed, and passes the peer (another serving
program) to the benchmarks that compare with one.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

import benchmarks.__main__ as bench
from benchmarks.handoff import handoff_rate
from benchmarks.handoff_peers import HandoffShape
from common.config.settings import KvTransport
from common.kv.layer_group import LayerGroupSpec


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The benchmarks that were run, in order. The one named prefill fails."""
    ran: list[str] = []

    def ends(command: Sequence[str], *, check: bool) -> SimpleNamespace:
        ran.append(" ".join(command).partition(" -m benchmarks.")[2])
        return SimpleNamespace(returncode=1 if "benchmarks.prefill" in command else 0)

    monkeypatch.setattr(subprocess, "run", ends)
    return ran


def test_one_that_misses_a_bound_ends_none_behind_it(
    commands: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    assert bench.main() == 1
    assert commands == [*bench.BESIDE_A_PEER, *bench.OTHERS]
    assert "13 benchmarks, missed a bound or failed: prefill" in capsys.readouterr().out


def test_a_peer_is_measured_beside_each_that_knows_one(commands: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--peer", "a program", "--no-save"])
    bench.main()
    assert [command for command in commands if "--peer a program" in command] == [
        f"{name} --peer a program --no-save" for name in bench.BESIDE_A_PEER
    ]
    assert all(command.endswith("--no-save") for command in commands)


def test_all_of_them_exist() -> None:
    for name in (*bench.BESIDE_A_PEER, *bench.OTHERS):
        assert importlib.util.find_spec(f"benchmarks.{name}") is not None
    assert {*bench.ON_ONE_CORE} <= {*bench.OTHERS}


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
async def test_the_peers_of_the_handoff_hand_over(transport: KvTransport) -> None:
    group = LayerGroupSpec("target", num_layers=2, num_planes=2, num_heads=1, head_dim=8, dtype="float32")
    shape = HandoffShape(group, prompt_tokens=64, num_prompts=2, kv_transport=transport)
    assert await handoff_rate(shape, num_prompts=2) > 0
