"""Tests that the Triton kernels compile for every supported GPU, without that GPU, and fit its limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest


@pytest.mark.thorough
def test_some_kernels_compile_for_each_target_and_fit_it(tmp_path: Path) -> None:
    """Compiles in another process, since Triton's interpreter is active in this one. That process's command fails if a
    kernel does not fit.
    """
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.compile_kernels", "--few"],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    compiled = [json.loads(line) for line in run.stdout.splitlines()]
    assert Counter(each["capability"] for each in compiled) == {80: 18, 90: 22, 100: 9}
    assert {each["dtype"] for each in compiled} == {"bfloat16", "float16", "float32"}
    assert {each["kernel"] for each in compiled} == {
        *("write", "attend", "combine", "draw"),
        *("norm", "rotate", "gate", "multiply"),
    }
    assert {each["kernel"] for each in compiled if "KV in FP8" in each["what"]} == {"write", "attend", "combine"}
    assert {each["what"] for each in compiled if each["kernel"] == "draw"} == {"target", "draft", "draft's tree"}
