"""Tests that the committed stubs are up to date, and work with the oldest libraries that pyproject.toml admits."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from scripts import stubs

COMMITTED = stubs.ROOT / stubs.PACKAGE


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out_dir = tmp_path_factory.mktemp("stubs")
    stubs.generate(out_dir)
    return out_dir / stubs.PACKAGE


def lower_bound(name: str) -> str:
    project = tomllib.loads((stubs.ROOT / "pyproject.toml").read_text())["project"]
    requirement = next(line for line in project["dependencies"] if re.match(rf"{name}[<>=]", line))
    found = re.search(r">=([\d.]+)", requirement)
    assert found is not None, requirement
    return found.group(1)


def test_the_committed_stubs_are_what_the_protos_generate(fresh: Path) -> None:
    assert stubs.differences(fresh, COMMITTED) == []


@pytest.mark.parametrize("name", ["types_pb2.py", "prefill_pb2_grpc.py", "inference_pb2.pyi", "inference_pb2_grpc.pyi"])
def test_an_edited_a_missing_and_a_left_over_stub_are_named(fresh: Path, tmp_path: Path, name: str) -> None:
    committed = shutil.copytree(COMMITTED, tmp_path / "v1")
    (committed / name).write_text("# edited by hand\n")
    (committed / "gone_pb2.py").touch()
    (committed / "prefill_pb2.py").unlink()
    assert stubs.differences(fresh, committed) == sorted([name, "gone_pb2.py", "prefill_pb2.py"])


def test_the_stubs_run_with_the_oldest_protobuf_we_admit() -> None:
    gencode = re.search(r"Protobuf Python Version: ([\d.]+)", (COMMITTED / "types_pb2.py").read_text())
    assert gencode is not None
    assert gencode.group(1) == lower_bound("protobuf")


def test_the_stubs_run_with_the_oldest_grpc_we_admit() -> None:
    gencode = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", (COMMITTED / "prefill_pb2_grpc.py").read_text())
    assert gencode is not None
    assert gencode.group(1) == f"{lower_bound('grpcio')}.0"
