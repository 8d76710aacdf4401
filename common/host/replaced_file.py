"""Replaces files as a whole, so that readers never find an incomplete one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yields a path beside `path`; the file that the block writes there takes the place of `path` at the block's end.

    If the block raises, `path` stays as it was. Only one process at a time may replace `path`.
    """
    new = path.with_name(f"{path.name}.new")
    yield new
    os.replace(new, path)
