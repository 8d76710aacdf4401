"""`python -m common.model.fused.compile DTYPE DIRECTORY`: compile the kernels, keep them in DIRECTORY.

Run by a service beside its serving; ends with it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch

from common.model.fused.start import load_kernels

_POLL_INTERVAL_S = 0.5


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_INTERVAL_S)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    load_kernels(Path(sys.argv[2]), getattr(torch, sys.argv[1]))
