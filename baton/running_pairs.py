"""Announces the pairs that `baton up` runs for this user, so that other commands find them.

Each pair has a file, which its process locks for as long as it lives. The kernel releases the lock however the process
ends, so a file without a lock is a leftover.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import platformdirs

from baton.errors import Unavailable
from common.host.replaced_file import replaced

_SUFFIX = ".pair.json"
_CHOOSING = "choosing.lock"
_LOOK_S = 0.05


@contextmanager
def choosing_ports(*, wait_s: float = 10.0) -> Iterator[frozenset[int]]:
    """Holds a lock under which a new pair chooses its ports. Yields the ports of this user's other pairs.

    Pairs that are still loading count too. Announce the new pair before leaving the block, so that the next one sees
    its ports. If the directory cannot be written, nothing is locked, and the ports of other pairs may be missing.
    Raises Unavailable if another process holds the lock for longer than `wait_s`.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            file = stack.enter_context((_made_directory() / _CHOOSING).open("w"))
            _lock(file.fileno(), wait_s)
        yield frozenset(port for pair in _read_pairs() for port in pair.ports)


@contextmanager
def announced(decode_addresses: Sequence[str], ports: Sequence[int] = ()) -> Iterator[None]:
    """Announces a pair until the block is left: this user's commands find it, and new pairs do not choose its ports.

    If the directory cannot be written, the pair is not announced.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            directory = _made_directory()
            path = directory / f"{os.getpid()}{_SUFFIX}"
            with replaced(path) as draft:  # readers find the file only locked and complete
                file = stack.enter_context(draft.open("w"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                json.dump({"decode": list(decode_addresses), "ports": list(ports)}, file)
                file.flush()
            stack.callback(path.unlink, missing_ok=True)
        yield


def running_pairs() -> list[str]:
    """Returns the decode addresses of each running pair, newest first, each in the format of a client's `address`."""
    return [",".join(pair.decode) for pair in sorted(_read_pairs(), reverse=True)]


class _AnnouncedPair(NamedTuple):
    announced_ns: int
    decode: list[str]
    ports: list[int]


def _read_pairs() -> list[_AnnouncedPair]:
    """Returns the announced pairs that still run, in no order, and removes the files of those that have ended."""
    found: list[_AnnouncedPair] = []
    with suppress(OSError):
        directory = _directory()
        if directory.stat().st_uid != os.getuid():
            return []  # files of another user do not count
        for path in directory.glob(f"*{_SUFFIX}"):
            with suppress(OSError, ValueError, TypeError), path.open() as file:
                if _is_leftover(file.fileno()):
                    path.unlink()
                else:
                    found.append(_AnnouncedPair(path.stat().st_mtime_ns, **json.load(file)))
    return found


def _lock(descriptor: int, wait_s: float) -> None:
    """Locks the open file. Raises Unavailable if another process holds the lock for longer than `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                words = f"another `baton up` has been choosing its ports for {wait_s:g} s: end it, or let it go on"
                raise Unavailable(words) from None
            time.sleep(_LOOK_S)


def _is_leftover(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _made_directory() -> Path:
    directory = _directory()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def _directory() -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns when there is no runtime directory and it takes another one
        return Path(platformdirs.user_runtime_dir("baton"))
