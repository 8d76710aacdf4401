"""Creates two network namespaces joined by a virtual cable that can be cut. Needs Linux and root.

The namespaces end with the process.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

NEAR_ADDRESS, FAR_ADDRESS = "10.77.0.1", "10.77.0.2"
_CLONE_NEWNET = 0x40000000
# Every packet is larger than the burst and is silently dropped, as by a cut cable.
_CUT = "root tbf rate 8bit burst 1 latency 1ms"

T = TypeVar("T")


class Cable:
    """A cable between two network namespaces. The calling thread moves to the near end.

    So do threads and processes that it starts later. Calls through `at_far_end` run in the other namespace, in one
    thread that lives as long as the cable.
    """

    def __init__(self) -> None:
        _new_namespace()
        self._far_end = ThreadPoolExecutor(1, thread_name_prefix="far-end")
        far_thread = self.at_far_end(_new_namespace)
        _ip(f"link add near type veth peer name far netns {far_thread}")
        _ip(f"addr add {NEAR_ADDRESS}/24 dev near")
        _ip("link set near up")
        self.at_far_end(lambda: _ip(f"addr add {FAR_ADDRESS}/24 dev far"))
        self.at_far_end(lambda: _ip("link set far up"))

    def at_far_end(self, call: Callable[[], T]) -> T:
        return self._far_end.submit(call).result()

    def cut(self) -> None:
        _run(f"tc qdisc add dev near {_CUT}")
        self.at_far_end(lambda: _run(f"tc qdisc add dev far {_CUT}"))

    def mend(self) -> None:
        _run("tc qdisc del dev near root")
        self.at_far_end(lambda: _run("tc qdisc del dev far root"))


def _new_namespace() -> int:
    """Moves the calling thread into a new network namespace. Returns the thread's id."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")
    _ip("link set lo up")
    return threading.get_native_id()


def _ip(arguments: str) -> None:
    _run(f"ip {arguments}")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True)
