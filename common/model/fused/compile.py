"""`python -m common.model.fused.compile DTYPE DIRECTORY`: compile the kernels, keep them in DIRECTORY."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from common.model.fused.start import load_kernels

if __name__ == "__main__":
    load_kernels(Path(sys.argv[2]), getattr(torch, sys.argv[1]))
