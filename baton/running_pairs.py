"""Where the pairs are that `baton up` keeps running for this user, so that other commands find them.

One file for each, locked by the process that keeps the pair for as long as it lives: however that ends, the lock goes
with it, and a file without one is taken for what it is, a leftover.
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import platformdirs

_SUFFIX = ".pair.json"


@contextmanager
def announced(decode_addresses: Sequence[str]) -> Iterator[None]:
    """The pair is found by this user's commands until this is left. A place that cannot be written makes it unfound."""
    with ExitStack() as stack:
        with suppress(OSError):
            directory = _directory()
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = directory / f"{os.getpid()}{_SUFFIX}"
            draft = path.with_suffix(".new")  # under the name that is looked for it is locked and whole
            file = stack.enter_context(draft.open("w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            json.dump(list(decode_addresses), file)
            file.flush()
            os.replace(draft, path)
            stack.callback(path.unlink, missing_ok=True)
        yield


def running_pairs() -> list[str]:
    """The decode addresses of each, as a client takes them, newest first; leftovers are removed."""
    found: list[tuple[int, str]] = []
    with suppress(OSError):
        directory = _directory()
        if directory.stat().st_uid != os.getuid():
            return []  # what others write there is not ours to follow
        for path in directory.glob(f"*{_SUFFIX}"):
            with suppress(OSError, ValueError, TypeError), path.open() as file:
                if _is_leftover(file.fileno()):
                    path.unlink()
                else:
                    found.append((path.stat().st_mtime_ns, ",".join(json.load(file))))
    return [addresses for _, addresses in sorted(found, reverse=True)]


def _is_leftover(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _directory() -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is none, and another is taken
        return Path(platformdirs.user_runtime_dir("baton"))
