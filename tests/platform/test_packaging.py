"""Tests that the command line and the services run with the libraries that their installation declares."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.lint.requirements import PROJECT, canonical, declared
from tests.platform.distributions import modules_outside, needed


def test_the_command_line_starts_without_the_services_libraries() -> None:
    """A command that needs one of these libraries names the extra to install."""
    names = {
        canonical(re.match(r"[\w.-]+", line).group())  # type: ignore[union-attr]
        for extra in ("engine", "gateway", "process")
        for line in PROJECT["optional-dependencies"][extra]
    }
    only_there = names - declared() - {"baton-serve"}
    roots = [
        root
        for root, distributions in importlib.metadata.packages_distributions().items()
        if root not in ("google", "opentelemetry") and only_there & {canonical(name) for name in distributions}
    ]
    assert {"torch", "numpy", "starlette", "structlog"} <= {*roots}
    hide = f"import sys; sys.modules.update(dict.fromkeys({roots!r}))"
    run = "from baton.cli.main import main; sys.argv = ['baton', 'demo']; main()"
    result = subprocess.run(
        [sys.executable, "-c", f"{hide}; {run}"], capture_output=True, text=True, timeout=600, check=False
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(
        r"FAILED_PRECONDITION: this command needs \w+: pip install 'baton-serve\[.*\]'\n", result.stderr
    )


@pytest.mark.thorough
def test_the_services_load_a_model_with_what_they_declare(tiny_model_dir: Callable[[str], Path]) -> None:
    """transformers imports some libraries only when it is called, and the machine of this test may have libraries that
    a user's has not.
    """
    hidden = sorted(modules_outside(needed(declared("engine"))))
    assert "hypothesis" in hidden and not {"torch", "numpy", "tokenizers"} & set(hidden)
    hide = f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))"
    load = f"load_target(Path({str(tiny_model_dir('llama'))!r}), device='cpu', dtype='float32', cpu_engine=engine)"
    run = (
        "from pathlib import Path; import torch; from common.model.loader import load_target;"
        " from common.service.cpu_engine import cpu_engine; engine = cpu_engine(torch.device('cpu')); assert engine;"
        f" {load}"
    )
    result = subprocess.run(
        [sys.executable, "-c", f"{hide}; {run}"], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
