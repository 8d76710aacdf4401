"""Tests that each import contract of pyproject.toml fails when its rule is broken. `make check` runs them all."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
CIRCLE = ("circles", "baton.client.planted", "import baton.cli.main")
PLANTED = [
    ("packages", "baton.planted", "import decode_service"),
    ("packages", "common.planted", "from baton import client"),
    ("packages", "common.planted", "import prefill_service.messages"),
    ("packages", "common.planted", "import training.data"),
    ("packages", "baton.cli.planted", "import training.data"),
    ("cpu", "common.model.planted", "def late():\n    from baton_cpu import engine"),
    ("cpu", "decode_service.planted", "import numba"),
    ("cpu-down", "baton_cpu.planted", "from baton.v1 import types_pb2"),
    ("cpu-down", "baton_cpu.planted", "import prefill_service.messages"),
    ("cpu-down", "baton_cpu.blocks.planted", "if TYPE_CHECKING:\n    import common.service.cpu_engine"),
    ("cpu-libraries", "baton_cpu.planted", "import h11"),
    ("ray", "baton.planted", "def late():\n    import ray"),
    ("ray", "gateway.planted", "import baton_ray.service"),
    ("ray-programs", "baton_ray.planted", "import decode_service.main"),
    ("services", "decode_service.planted", "import baton.client"),
    ("services", "prefill_service.planted", "import baton.cli.main"),
    ("services", "decode_service.planted", "import training.data"),
    ("packages", "training.planted", "import decode_service"),
    ("packages", "gateway.planted", "import prefill_service.messages"),
    ("gateway", "gateway.planted", "import training.data"),
    ("gateway-light", "gateway.planted", "import torch"),
    ("packages", "decode_service.planted", "import prefill_service"),
    ("packages", "prefill_service.planted", "import decode_service.messages"),
    ("common-rooms", "common.kv.planted", "import common.model.target"),
    ("common-rooms", "common.rpc.planted", "import common.wire.handoff"),
    ("common-rooms", "common.host.planted", "def late():\n    import common.device.stream"),
    ("common-rooms", "common.attention.planted", "if TYPE_CHECKING:\n    import common.draft.paged_head"),
    ("common-rooms", "common.planted", "import dataclasses"),
    CIRCLE,
    ("decode-rooms", "decode_service.forward.planted", "import decode_service.schedule.scheduler"),
    ("decode-rooms", "decode_service.edge.planted", "import decode_service.schedule.request"),
    ("decode-rooms", "decode_service.planted", "import torch"),
    ("prefill-rooms", "prefill_service.handoff.planted", "import prefill_service.schedule.scheduler"),
    ("engine", "common.kv.planted", "import grpc"),
    ("engine", "common.model.planted", "def late():\n    import structlog"),
    ("engine", "common.device.planted", "import common.wire.codec_frames"),
    ("nixl", "common.nixl.planted", "import torch"),
]
"""Imports that a contract forbids, each with the module that has it."""


def lint_imports(directory: Path) -> str:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode != 0, result.stdout
    return result.stdout + result.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of our packages, in which tests plant imports."""
    for package in (*PYPROJECT["root_packages"], "scripts"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "*.pyi"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_planted_imports_break_every_contract_and_are_named(checkout: Path) -> None:
    for _, module, statement in PLANTED:
        with (checkout / f"{module.replace('.', '/')}.py").open("a") as file:
            file.write(f"{statement}\n")
    _, *parts = re.split(r"^(.+)\n-+\n", lint_imports(checkout), flags=re.MULTILINE)
    told = dict(zip(parts[::2], parts[1::2], strict=True))
    title_of = {contract["id"]: contract["name"] for contract in PYPROJECT["contracts"]}
    assert {contract for contract, _, _ in PLANTED} == title_of.keys()
    named = {planted: planted[1] for planted in PLANTED} | {CIRCLE: ".client -> .cli"}
    assert [planted for planted in PLANTED if named[planted] not in told[title_of[planted[0]]]] == []


def test_an_engine_module_that_is_gone_is_an_error(checkout: Path) -> None:
    shutil.move(checkout / "common/draft/block.py", checkout / "common/draft/blocks.py")
    assert "no such module: common.draft.block" in lint_imports(checkout)
