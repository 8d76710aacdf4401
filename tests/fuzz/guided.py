"""`python -m tests.fuzz.guided TARGET KEPT CORPUS [flags]`: fuzzes one target with atheris, whose libFuzzer ends the
process when it is done.
"""

from __future__ import annotations

import logging
import sys

import atheris

from tests.fuzz.hunt import INSTRUMENTED


def main() -> None:
    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        from tests.fuzz.catalogue import TARGETS
    name, *arguments = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    with TARGETS[name].open() as run:
        atheris.Setup([sys.argv[0], *arguments], run)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
