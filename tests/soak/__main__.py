"""Runs storms of requests with faults, retractions and restarts. Every output is checked, and memory, threads and
descriptors must not grow.

python -m tests.soak [--minutes 30] [--shared-memory]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.soak.figures import Figures, Trend
from tests.soak.services import KV_TOKENS, REQUESTS_A_WAVE, STEADY, SoakReport, soak
from tests.storm.ends import ends_of, needless_cancels, unseen_failures
from tests.storm.oracle import make_cases
from tests.storm.pairs import Models, Setting, disturbed_pair, faults_everywhere
from tests.storm.verdict import Faults, dead_points, faults_of, problems_of, unexplained, visits_of

NUM_CASES = 100
MIN_WAVES = 48
"""The fewest waves that allow a verdict on growth. With fewer requests, normal fluctuations of memory would look like
growth.
"""
SMALL_CACHES = {"LRU_CACHE_CAPACITY": "64", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""Environment variables that limit oneDNN's cache, which keeps compiled code for up to 1,024 shapes. Unlimited, it
slowly takes hundreds of MiB, like a leak.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shared-memory", action="store_true", help="KV goes through shared memory")
    options = parser.parse_args()
    setting = Setting(overlap=True, speculates=True, shares_memory=options.shared_memory)
    os.environ |= SMALL_CACHES
    with tempfile.TemporaryDirectory() as name:
        return _soak(Path(name), setting, minutes=options.minutes, seed=options.seed)


def _soak(directory: Path, setting: Setting, *, minutes: float, seed: int) -> int:
    models = Models.save(directory)
    cases = make_cases(models.target, NUM_CASES)
    end_s = time.monotonic() + 60 * minutes
    plan = faults_everywhere(seed, setting)
    with disturbed_pair(models, setting, plan, directory, num_each=2, kv_tokens=KV_TOKENS) as services:
        report = SoakReport()
        for report in soak(services, cases, is_over=lambda: time.monotonic() > end_s, seed=seed):
            print(_progress(report), flush=True)
    faults, ends = faults_of(services.processes.services), ends_of(services.processes.decode)
    print(_table(report, faults))
    problems = problems_of(
        report.all_storms,
        ends,
        faults,
        num_requests=report.num_waves * REQUESTS_A_WAVE * len(report.by_service),
        speculates=True,
        resumes=True,
    )
    visits = visits_of(services.processes.services)
    problems += dead_points(plan, faults, visits, is_long=report.num_waves >= MIN_WAVES)
    for service in services.processes.decode:
        storm = report.by_service[service.name]
        texts = [*storm.texts, *unseen_failures(storm.ends, ends_of((service,)))]
        own_faults = faults_of((*services.processes.prefill, service))
        problems += [f"{service.name}: {problem}" for problem in unexplained(texts, own_faults)]
        if service.name in STEADY:
            problems += needless_cancels(storm.ends, ends_of((service,)))
    if report.num_waves >= MIN_WAVES:
        problems += [f"{name} has grown" for name in sorted(STEADY) if not _trend(report.samples[name]).is_flat]
    else:
        problems.append(f"{report.num_waves} waves are too few to tell growth from settling: at least {MIN_WAVES}")
    print("\n".join(problems))
    return 1 if problems else 0


def _trend(samples: Sequence[Figures]) -> Trend:
    """Returns the trend of one service. Between two samples it served REQUESTS_A_WAVE requests: each wave sends that
    many for each of the two services of a role.
    """
    return Trend.of(samples, requests_a_sample=REQUESTS_A_WAVE)


def _progress(report: SoakReport) -> str:
    latest = {name: samples[-1] for name, samples in report.samples.items()}
    figures = ", ".join(
        f"{name} {sample.rss_mib:.0f} MiB {sample.num_fds} fds {sample.num_threads} threads"
        for name, sample in latest.items()
    )
    num_ended = sum(storm.num_ended for storm in report.by_service.values())
    return f"wave {report.num_waves}: {num_ended} requests, {len(report.all_storms.wrong)} wrong; {figures}"


def _table(report: SoakReport, faults: Faults) -> str:
    lines = [
        "",
        f"{report.num_waves} waves; {', '.join(f'{count} x {blow}' for blow, count in sorted(report.blows.items()))}; "
        f"{faults.total()} faults",
        "",
        "| decode service | requests | finished, exact | left by clients | failed | wrong | retractions "
        "| handoffs a request | drafts accepted |",
        "|" + "---|" * 9,
    ]
    for name, storm in report.by_service.items():
        failed = ", ".join(f"{number} {status.strip()}" for status, number in sorted(storm.failed.items())) or "0"
        lines.append(
            f"| {name} | {storm.num_ended} | {storm.num_finished} | {storm.num_aborted} | {failed} "
            f"| {len(storm.wrong)} | {storm.num_retractions} | {storm.num_attempts / max(1, storm.num_finished):.2f} "
            f"| {storm.num_accepted} of {storm.num_drafted} |"
        )
    if report.num_waves >= MIN_WAVES:
        lines += ["", *_growth(report)]
    lines += ["", "| service | fault | happened |", "|" + "---|" * 3]
    lines += [f"| {role} | {action} at `{point}` | {n} |" for (role, point, action), n in sorted(faults.items())]
    return "\n".join(lines)


def _growth(report: SoakReport) -> list[str]:
    lines = [
        "| process | restarted | memory, MiB | a request, KiB | file descriptors | threads | rows and slots | |",
        "|" + "---|" * 8,
    ]
    for name, samples in report.samples.items():
        trend = _trend(samples)
        is_steady = name in STEADY
        lines.append(
            f"| {name} | {'no' if is_steady else 'yes'} | {trend.before.rss_mib:.1f} to {trend.after.rss_mib:.1f} "
            f"| {f'{trend.growth_kib:.2f}' if is_steady else ''} "
            f"| {trend.before.num_fds:.0f} to {trend.after.num_fds:.0f} "
            f"| {trend.before.num_threads:.0f} to {trend.after.num_threads:.0f} | all free after each wave "
            f"| {('flat' if trend.is_flat else 'GROWN') if is_steady else ''} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
