"""Runs inputs through one target until the time is over or an input breaks the target's contract.

In structured mode, hypothesis draws inputs that follow the format. In guided mode, atheris mutates bytes and keeps
inputs that reach new code.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.target import Run, Target

KEPT = Path(".fuzz")
"""The directory of the inputs that reached new code in guided runs, by target. Later runs also start from them."""
MAX_INPUT_BYTES = 4096
INPUT_TIMEOUT_S = 60
_EXAMPLES_A_ROUND = 200
_START_ALLOWANCE_S = 120.0
# The modules of a target that atheris instruments. Functions that numba compiles are left as they were written.
INSTRUMENTED = (
    "common.errors",
    "common.rpc.errors",
    "common.text.tokenizer",
    "common.wire",
    "decode_service.edge.text.detokenizer",
    "decode_service.schedule.dispatcher",
    "decode_service.schedule.handoff_policy",
    "decode_service.edge",
    "decode_service.schedule.landing",
    "decode_service.edge.text.output",
    "decode_service.schedule.scheduler",
    "prefill_service.edge",
)


@dataclass(frozen=True, slots=True)
class Findings:
    num_inputs: int
    num_new_entries: int = 0
    crash: Path | None = None
    report: str = ""


def save(target: Target, data: bytes) -> Path:
    """Saves a failing input in the corpus, so that the test suite runs it until it is fixed."""
    path = target.corpus / f"crash-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


@contextlib.contextmanager
def bounded_input() -> Iterator[None]:
    """Raises TimeoutError inside an input that hangs. It works in the main thread only."""

    def expire(_number: int, _frame: object) -> None:
        raise TimeoutError(f"one input took more than {INPUT_TIMEOUT_S} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.alarm(INPUT_TIMEOUT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def structured(target: Target, seconds: float) -> Findings:
    give_up_s = time.monotonic() + seconds
    num_inputs = 0
    broken: list[bytes] = []

    def attack(run: Run, round_number: int) -> None:
        @seed(round_number)
        @settings(
            max_examples=_EXAMPLES_A_ROUND,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(target.inputs(target.seeds()))
        def once(data: bytes) -> None:
            nonlocal num_inputs
            if not broken and time.monotonic() > give_up_s:
                return
            num_inputs += 1
            try:
                with bounded_input():
                    run(data)
            except BaseException:
                broken.append(data)
                raise

        once()

    round_number = time.time_ns()
    with target.open() as run:
        while time.monotonic() < give_up_s:
            round_number += 1
            try:
                attack(run, round_number)
            except BaseException as error:
                if not broken:
                    raise
                return Findings(num_inputs, 0, save(target, broken[-1]), f"{type(error).__name__}: {error}")
    return Findings(num_inputs)


def guided(target: Target, seconds: float) -> Findings:
    """Fuzzes the target with coverage guidance, in a process of its own, since libFuzzer ends the process it runs
    in.
    """
    kept = KEPT / target.name
    kept.mkdir(parents=True, exist_ok=True)
    num_before = len(list(kept.iterdir()))
    artifact = kept.parent / f"{target.name}-"
    command = [
        *(sys.executable, "-m", "tests.fuzz.guided", target.name, str(kept), str(target.corpus)),
        *(f"-max_total_time={round(seconds)}", f"-max_len={MAX_INPUT_BYTES}", f"-timeout={INPUT_TIMEOUT_S}"),
        *(f"-artifact_prefix={artifact}", "-print_final_stats=1", "-rss_limit_mb=6144", "-verbosity=1"),
    ]
    end = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=seconds + INPUT_TIMEOUT_S + _START_ALLOWANCE_S
    )
    stated = re.search(r"stat::number_of_executed_units:\s+(\d+)", end.stderr)
    num_new = len(list(kept.iterdir())) - num_before
    if end.returncode == 0 and stated:
        return Findings(int(stated[1]), num_new)
    written = re.search(r"Test unit written to (\S+)", end.stderr)
    crash = save(target, Path(written[1]).read_bytes()) if written else target.corpus
    return Findings(int(stated[1]) if stated else 0, num_new, crash, (end.stdout + end.stderr)[-6000:])


def has_atheris() -> bool:
    try:
        importlib.import_module("atheris")
    except ImportError:
        return False
    return True
