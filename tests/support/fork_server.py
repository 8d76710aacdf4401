"""`python -m tests.support.fork_server`: forks services from a process that has already imported their packages.

Each line on standard input, `{"arguments": ["-m", MODULE, ...], "log_file": PATH}`, starts one child. The server
answers with the child's process id, and with `[pid, status]` once the child has ended. The server ends when its input
ends, and its children die with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import torch
from transformers.utils import logging

import prefill_service.main  # noqa: F401 - imported for the children
from baton_cpu.compiler.kernel_cache import keep_kernels
from common.checkpoints.cache import kernels_cache_dir
from tests.support.loading import load_target
from tests.support.models import save_tiny_model
from tests.support.running_pair import wait_until

PR_SET_PDEATHSIG = 1


def main() -> None:
    _compile_kernels()
    wait_until(lambda: len(os.listdir("/proc/self/task")) == 1, about=lambda: "a child would miss the other threads")
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _be_service(**order)
        _say(pid)


def _compile_kernels() -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    keep_kernels(kernels_cache_dir())
    with tempfile.TemporaryDirectory() as directory:
        load_target(save_tiny_model(Path(directory), "llama"), device="cpu", dtype="float32")


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say([pid, os.waitstatus_to_exitcode(status)])


def _say(value: object) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")


def _be_service(*, arguments: list[str], log_file: str) -> None:
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        log = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        flag, module, *rest = arguments
        assert flag == "-m"
        sys.argv = [module, *rest]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
