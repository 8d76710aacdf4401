"""`python -m baton_cpu.program.compile DTYPE DIRECTORY PARENT NICENESS` compiles the kernels for DTYPE and keeps them
in DIRECTORY.

PARENT is the process id of the parent. The process ends when its parent ends. It adds NICENESS to its own niceness.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

_POLL_INTERVAL_S = 0.5


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_INTERVAL_S)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[3]),), daemon=True).start()
    os.nice(int(sys.argv[4]))
    import torch  # it takes seconds, in which the parent may end

    from baton_cpu.program.fusing import load_kernels

    load_kernels(Path(sys.argv[2]), getattr(torch, sys.argv[1]))
