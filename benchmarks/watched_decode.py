"""The decode service as users start it, with a look at its threads.

python -m benchmarks.watched_decode --watch=FILE [--switch-interval=SECONDS] [settings]

Twenty times a second a line of FILE says, as JSON, what the forward stream and the engine's thread have done by then,
in seconds since the start. The switch interval is how long a thread keeps the interpreter that another waits for.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.config.settings import DecodeSettings
from common.device import cpu
from common.device.cpu import CpuEvent
from common.device.stream import Scope, Work
from common.service_main import Serve, run_service

_WATCH, _INTERVAL = "--watch=", "--switch-interval="
_SAMPLE_INTERVAL_S = 0.05


@dataclass
class ThreadTimes:
    """`at_s` is on the machine's monotonic clock, like the client's. `busy_s`, `busy_cpu_s`: of the forward stream's
    pieces, by the wall and by their thread. `step_s`, `step_cpu_s`: of the engine's steps, of which it waited for
    streams for `wait_s`.
    """

    at_s: float = 0.0
    busy_s: float = 0.0
    busy_cpu_s: float = 0.0
    num_steps: int = 0
    step_s: float = 0.0
    step_cpu_s: float = 0.0
    wait_s: float = 0.0


def _watch_stream(times: ThreadTimes) -> None:
    run_piece, synchronize = cpu.run_piece, CpuEvent.synchronize

    def watched_piece(work: Work, scope: Scope | None, stream_scope: Scope) -> None:
        if stream_scope.name != "forward":
            run_piece(work, scope, stream_scope)
            return
        begun_s, cpu_s = time.perf_counter(), time.thread_time()
        run_piece(work, scope, stream_scope)
        times.busy_s += time.perf_counter() - begun_s
        times.busy_cpu_s += time.thread_time() - cpu_s

    def watched_synchronize(event: CpuEvent, timeout_s: float) -> None:
        begun_s = time.perf_counter()
        try:
            synchronize(event, timeout_s)
        finally:
            if threading.current_thread().name == "decode-engine":
                times.wait_s += time.perf_counter() - begun_s

    cpu.run_piece = watched_piece
    CpuEvent.synchronize = watched_synchronize  # type: ignore[method-assign]


def _watch_engine(times: ThreadTimes) -> None:
    from decode_service.scheduler import DecodeEngine

    step = DecodeEngine.step

    def watched_step(self: DecodeEngine, commands: Any) -> Any:
        begun_s, cpu_s = time.perf_counter(), time.thread_time()
        events = step(self, commands)
        times.step_s += time.perf_counter() - begun_s
        times.step_cpu_s += time.thread_time() - cpu_s
        times.num_steps += 1
        return events

    DecodeEngine.step = watched_step  # type: ignore[method-assign]


def _write(times: ThreadTimes, path: Path) -> None:
    with path.open("w", buffering=1) as file:
        while True:
            time.sleep(_SAMPLE_INTERVAL_S)
            times.at_s = time.perf_counter()
            file.write(json.dumps(asdict(times)) + "\n")


def _import_watched_serve() -> Serve[DecodeSettings]:
    from decode_service.main import serve

    times = ThreadTimes()
    _watch_stream(times)
    _watch_engine(times)
    path = Path(_value_of(_WATCH))
    threading.Thread(target=_write, args=(times, path), name="watch", daemon=True).start()
    if interval := _value_of(_INTERVAL):
        sys.setswitchinterval(float(interval))
    return serve


def _value_of(flag: str) -> str:
    return next((argument.removeprefix(flag) for argument in sys.argv if argument.startswith(flag)), "")


if __name__ == "__main__":
    own = (_WATCH, _INTERVAL)
    settings = [argument for argument in sys.argv[1:] if not argument.startswith(own)]
    sys.exit(run_service("decode_service", DecodeSettings, _import_watched_serve, settings))
