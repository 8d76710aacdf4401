"""Runs storms of requests in every setting, and prints the results as a table.

python -m tests.storm [--requests 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from tests.storm.ends import ends_of
from tests.storm.oracle import make_cases
from tests.storm.pairs import SETTINGS, Models, Setting, disturbed_pair, frame_faults, lent_and_frame_faults
from tests.storm.storm import Storm, StormReport, send_storm
from tests.storm.verdict import Faults, dead_points, faults_of, problems_of, visits_of
from tests.support.running_pair import wait_until

NUM_CASES = 120
HEADER = (
    "| setting | requests | finished, exact | left by clients | failed | wrong | retractions | faults "
    "| handoffs a request | cached tokens a request | left by other prompts | drafts accepted | pools full "
    "| seconds |\n|" + "---|" * 14
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        models = Models.save(directory)
        cases = make_cases(models.target, NUM_CASES)
        print(HEADER, flush=True)
        for setting in SETTINGS:
            begun_s = time.monotonic()
            storm = Storm(num_requests=options.requests, seed=options.seed)
            plan = (lent_and_frame_faults if setting.shares_memory else frame_faults)(options.seed)
            own = directory / str(setting)
            own.mkdir()
            with disturbed_pair(models, setting, plan, own) as pair:
                report = asyncio.run(send_storm(pair.client.address, cases, storm))
                wait_until(pair.holds_nothing, about=lambda pair=pair: (pair.load(), pair.prefill_load()))
                pair.processes.check()
            faults, ends = faults_of(pair.processes.services), ends_of(pair.processes.decode)
            print(_row(setting, report, faults, time.monotonic() - begun_s), flush=True)
            problems += problems_of(report, ends, faults, num_requests=options.requests, speculates=setting.speculates)
            problems += dead_points(plan, faults, visits_of(pair.processes.services))
    print("\n".join(problems))
    return 1 if problems else 0


def _row(setting: Setting, report: StormReport, faults: Faults, wall_s: float) -> str:
    failed = ", ".join(f"{number} {name}" for name, number in sorted(report.failed.items())) or "0"
    drafts = f"{report.num_accepted} of {report.num_drafted}" if setting.speculates else ""
    cells = (
        str(setting),
        str(report.num_ended),
        str(report.num_finished),
        str(report.num_aborted),
        failed,
        str(len(report.wrong)),
        str(report.num_retractions),
        str(faults.total()),
        f"{report.num_attempts / max(1, report.num_finished):.2f}",
        f"{report.num_cached_tokens / max(1, report.num_finished):.0f}",
        f"{report.num_shared_tokens} of {report.num_cached_tokens}",
        drafts,
        "yes",
        f"{wall_s:.0f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
