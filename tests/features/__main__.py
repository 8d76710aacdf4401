"""Makes all runs, and writes their table into docs/features.md."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from tests.features.matrix import PAGE, table
from tests.features.runs import Runs


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        made = table(Runs(Path(directory)).every())
    PAGE.write_text(re.sub(r"(?m)(^\|.*\n)+", lambda _: made, PAGE.read_text(), count=1))
    print(made, end="")


if __name__ == "__main__":
    main()
