"""Prints, as tables, how many orders each scenario has and which order shows each mutant.

python -m tests.interleavings.report [--orders N]
"""

from __future__ import annotations

import argparse
import time

import pytest
import torch

from tests.interleavings.catalogue import CAUGHT_BY, EXHAUSTIVE, LARGE, NUM_ORDERS
from tests.interleavings.explorer import explore, sample, shorten


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=int, default=200, help="random ones of each large scenario")
    num_random = parser.parse_args().orders
    torch.set_num_threads(1)
    print("| scenario | interleavings | all of them | seconds | result |\n|---|---|---|---|---|")
    for scenario in (*EXHAUSTIVE, *LARGE):
        began_s = time.monotonic()
        is_small = scenario in EXHAUSTIVE
        found = explore(scenario.program) if is_small else sample(scenario.program, num_runs=num_random, seed=0)
        seconds, is_all = time.monotonic() - began_s, "yes" if found.is_exhaustive else "no"
        print(
            f"| {scenario.name} | {found.num_interleavings} | {is_all} | {seconds:.1f} | {found.failure or 'clean'} |"
        )
    print("\n| mutant | scenario | after interleavings | what showed | order |\n|---|---|---|---|---|")
    for mutant, scenario, _ in CAUGHT_BY:
        with pytest.MonkeyPatch.context() as patch:
            mutant(patch)
            failure = sample(scenario.program, num_runs=NUM_ORDERS, seed=0).failure
            if failure is None:
                print(f"| {mutant.__name__} | {scenario.name} | {NUM_ORDERS} | NOT CAUGHT | |")
                continue
            short = shorten(scenario.program, failure)
            symptom = str(short.error).splitlines()[0][:80]
            print(f"| {mutant.__name__} | {scenario.name} | {short.num_interleavings} | {symptom} | `{short.script}` |")


if __name__ == "__main__":
    main()
