"""`python -m baton_cpu.program.compile DTYPE DIRECTORY NICENESS` compiles the kernels for DTYPE and keeps them in
DIRECTORY. It adds NICENESS to its own niceness.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.nice(int(sys.argv[3]))
    import torch

    from baton_cpu.program.fusing import load_kernels

    load_kernels(Path(sys.argv[2]), getattr(torch, sys.argv[1]))
