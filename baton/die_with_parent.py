"""Runs a command in a process that the kernel kills once its parent is gone.

    die_with_parent.py PARENT_PID COMMAND...

This is a separate script because code between fork and exec is unsafe in a process with gRPC's threads. For the kernel
the parent is the thread that started the process. On systems other than Linux the command runs, but nothing kills it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit("prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # the parent died before the request above took effect
        sys.exit("the parent is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
