"""Prints two tables: the number of orders of each scenario, and the order that shows each mutant of the catalogue.

python -m tests.interleavings.report [--orders N]
"""

from __future__ import annotations

import argparse
import time

import pytest
import torch

from tests.engine.mutants.kinds import Mutant
from tests.interleavings.catalogue import CAUGHT_BY, EXHAUSTIVE, LARGE, NO_ORDER_HAS, NUM_ORDERS, SOME_ORDER_HAS
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
    print("\n| mutant | shown by | after interleavings | what showed | order |\n|---|---|---|---|---|")
    for mutant, scenario, _ in CAUGHT_BY:
        with pytest.MonkeyPatch.context() as patch:
            mutant(patch)
            failure = sample(scenario.program, num_runs=NUM_ORDERS, seed=0).failure
            assert failure is not None, f"{mutant.__name__} does not show in {scenario.name}"
            short = shorten(scenario.program, failure)
            _print_row(mutant, scenario.name, short.num_interleavings, str(short.error), f"`{short.script}`")
    for mutant, scenario in NO_ORDER_HAS:
        with pytest.MonkeyPatch.context() as patch:
            mutant(patch)
            report = sample(scenario.program, num_runs=NUM_ORDERS, seed=0)
            gone = sorted(SOME_ORDER_HAS[scenario] - report.witnessed)
            assert gone, f"{mutant.__name__} does not show in {scenario.name}"
            _print_row(mutant, scenario.name, report.num_interleavings, f"in no order {gone[-1]}", "every one")


def _print_row(mutant: Mutant, shown_by: str, num_interleavings: int, symptom: str, order: str) -> None:
    line = symptom.splitlines()[0][:90].replace("|", "\\|")
    print(f"| {mutant.__name__} | {shown_by} | {num_interleavings} | {line} | {order} |")


if __name__ == "__main__":
    main()
