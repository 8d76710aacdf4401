"""The committed stubs are those of proto/, and work with the oldest libraries that pyproject.toml admits."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts.lint.problem import ROOT, Problem, unequal
from scripts.lint.requirements import PROJECT
from scripts.stubs import PACKAGE, differences, generate


def stubs_are_those_of_the_protos() -> Iterator[Problem]:
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        for name in differences(Path(directory) / PACKAGE, ROOT / PACKAGE):
            yield Problem(ROOT / PACKAGE / name, 0, "is not what `make stubs` writes")


def stubs_run_with_the_oldest_libraries_that_we_admit() -> Iterator[Problem]:
    for library, file, version in (
        ("protobuf", "types_pb2.py", r"Protobuf Python Version: ([\d.]+)"),
        ("grpcio", "prefill_pb2_grpc.py", r"GRPC_GENERATED_VERSION = '([\d.]+)\.0'"),
    ):
        (bound,) = [line for line in PROJECT["dependencies"] if line.startswith(f"{library}>=")]
        wanted = re.findall(r">=([\d.]+)", bound)
        found = re.findall(version, (ROOT / PACKAGE / file).read_text())
        yield from unequal(ROOT / PACKAGE / file, f"the oldest {library}", found, wanted)
