"""Serves the demo model on a Ray cluster of three nodes on this machine: `make ray-test`.

python -m tests.ray

Ray is installed in an environment of its own, which adds it to the project's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-ray"
INSTALL_TIMEOUT_S = 600.0
RUN_TIMEOUT_S = 1800.0


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    python = _install()
    return subprocess.run([python, "-m", "tests.ray.run"], cwd=ROOT, timeout=RUN_TIMEOUT_S, check=False).returncode


def _install() -> Path:
    """Installs Ray, unless it is installed. Returns the interpreter."""
    command = [sys.executable, ROOT / "scripts" / "requirement.py", "ray"]
    wanted = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    python, installed = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "installed"
    if not installed.exists() or installed.read_text() != wanted:
        venv.create(ENVIRONMENT, clear=True, with_pip=True)
        (packages,) = ENVIRONMENT.glob("lib/python3*/site-packages")
        (packages / "project.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
        command = [python, "-m", "pip", "install", "--quiet", wanted]
        subprocess.run(command, timeout=INSTALL_TIMEOUT_S, check=True)
        installed.write_text(wanted)
    return python


if __name__ == "__main__":
    sys.exit(main())
