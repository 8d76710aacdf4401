"""Tests the import contracts of pyproject.toml: the code keeps each one, and each one fails when its rule is broken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("baton", "baton_cpu", "baton_ray", "common", "prefill_service", "decode_service", "gateway", "training")


def lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of our packages, in which tests plant imports."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "*.pyi"))
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_code_keeps_every_contract(checkout: Path) -> None:
    result = lint_imports(checkout)
    assert result.returncode == 0, result.stdout
    assert ", 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("baton/planted.py", "import decode_service", "baton imports no service"),
        ("common/planted.py", "from baton import client", "common imports baton.v1 at most"),
        ("common/planted.py", "import prefill_service.messages", "common imports baton.v1 at most"),
        ("decode_service/planted.py", "import baton.client", "services import common and baton.v1"),
        (
            "prefill_service/planted.py",
            "import baton.cli.main",
            "services import common and baton.v1",
        ),
        ("decode_service/planted.py", "import training.data", "services import common and baton.v1"),
        ("common/planted.py", "import training.data", "common imports baton.v1 at most"),
        ("training/planted.py", "import decode_service", "training imports no service"),
        ("decode_service/planted.py", "import prefill_service", "the services do not import each other"),
        ("prefill_service/planted.py", "import decode_service.messages", "the services do not import each other"),
        ("common/kv/planted.py", "import common.model.target", "inside common"),
        ("common/rpc/planted.py", "import common.wire.handoff", "inside common"),
        ("common/host/planted.py", "def late():\n    import common.device.stream", "inside common"),
        ("common/planted.py", "import dataclasses", "inside common"),
        ("baton/client/planted.py", "import baton.cli.main", "no circle of imports"),
        ("decode_service/forward/planted.py", "import decode_service.schedule.scheduler", "inside the decode service"),
        ("decode_service/edge/planted.py", "import decode_service.schedule.request", "inside the decode service"),
        ("decode_service/planted.py", "import torch", "inside the decode service"),
        (
            "prefill_service/handoff/planted.py",
            "import prefill_service.schedule.scheduler",
            "inside the prefill service",
        ),
        ("common/kv/planted.py", "import grpc", "the engine needs torch"),
        ("common/model/planted.py", "def late():\n    from baton_cpu import engine", "only common.cpu_engine imports"),
        ("decode_service/planted.py", "import numba", "only common.cpu_engine imports"),
        ("baton_cpu/planted.py", "from baton.v1 import types_pb2", "baton_cpu imports common"),
        ("baton_cpu/planted.py", "import prefill_service.messages", "baton_cpu imports common"),
        ("baton_cpu/planted.py", "import h11", "baton_cpu needs the engine's libraries"),
        ("baton/planted.py", "def late():\n    import ray", "only baton_ray imports Ray"),
        ("gateway/planted.py", "import baton_ray.service", "only baton_ray imports Ray"),
        ("baton_ray/planted.py", "import decode_service.main", "baton_ray starts the services as programs"),
        ("common/nixl/planted.py", "import torch", "the process that NIXL lives in"),
        ("common/model/planted.py", "def late():\n    import structlog", "the engine needs torch"),
        ("common/device/planted.py", "import common.wire.codec_frames", "the engine needs torch"),
    ],
)
def test_a_planted_import_breaks_its_contract(checkout: Path, module: str, statement: str, contract: str) -> None:
    (checkout / module).write_text(statement + "\n")
    result = lint_imports(checkout)
    assert result.returncode == 1, result.stdout
    broken = [line for line in result.stdout.splitlines() if " BROKEN" in line]
    assert any(line.startswith(contract) for line in broken), result.stdout


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("common/wire/planted.py", "from baton.v1 import types_pb2"),
        ("decode_service/edge/planted.py", "from baton.v1 import inference_pb2\nfrom common import errors"),
        ("training/planted.py", "from baton.client import Client\nfrom common import errors"),
        ("baton/cli/planted.py", "def late():\n    import training.run"),
        ("common/kv/planted.py", "import dataclasses\nimport numpy\nimport torch.nn\nimport transformers"),
    ],
)
def test_what_the_rule_allows_is_kept(checkout: Path, module: str, statement: str) -> None:
    (checkout / module).write_text(statement + "\n")
    result = lint_imports(checkout)
    assert result.returncode == 0, result.stdout


def test_an_engine_module_that_is_gone_is_an_error(checkout: Path) -> None:
    shutil.move(checkout / "common/draft/block.py", checkout / "common/draft/blocks.py")
    result = lint_imports(checkout)
    assert result.returncode != 0
    assert "no such module: common.draft.block" in result.stdout + result.stderr
