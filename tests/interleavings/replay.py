"""Runs one order of a scenario again, given as a script.

python -m tests.interleavings.replay two_requests-plain-2_rows 'host*2 wire host*5 landing'
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

import torch

from tests.interleavings.catalogue import scenario_named
from tests.interleavings.explorer import Script, replay


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", help="as the report or the soak names it")
    parser.add_argument("script", type=Script.parse, help="behind its end streams run as late as they can")
    options = parser.parse_args(arguments)
    try:
        scenario = scenario_named(options.scenario)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    failure = replay(scenario.program, options.script)
    if failure is not None:
        traceback.print_exception(failure)
        return 1
    print("clean")
    return 0


if __name__ == "__main__":
    sys.exit(main())
