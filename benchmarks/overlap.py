"""Shows a timeline of speculative decoding: when each step's verify and draft-extend ended, and when the next was
scheduled.

Both engines run in one process on SmolLM2 with Baton's own draft head. Times are from the forward stream and the engine
thread, in milliseconds since the first event shown. Writes a table into benchmarks/results. The exit status is 1 unless
scheduling began before draft-extend ended in nine steps of ten.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.benchmark_run import BenchmarkRun
from benchmarks.machine import demo_model_dir
from common.checkpoints.source import resolve_draft
from common.device.factory import open_device
from common.device.stream import Device, Event, Stream
from common.kv.pool import KvPool
from common.sampling.params import ResolvedSampling
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.forward.worker import Worker, WorkerOutput
from decode_service.schedule.schedule_batch import ScheduleBatch
from tests.support.loading import load_draft, load_target
from tests.support.pair import InProcessPair, PairOptions

NUM_SHOWN = 8
MIN_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Step:
    """The times of one step in seconds, on one clock.

    `next_prepared_s` is when the engine thread began to prepare the next step.
    """

    verified_s: float
    extended_s: float
    next_prepared_s: float


class Watch:
    """Records when steps are prepared, and the events that they record on the forward stream."""

    def __init__(self) -> None:
        self.prepared_s: list[float] = []
        self.marks: list[Sequence[Event]] = []
        self._origin: tuple[Event, float] | None = None

    def start(self, stream: Stream) -> None:
        """Aligns the stream's clock with this thread's. The stream must be idle."""
        event = stream.record()
        event.synchronize(10.0)
        self._origin = (event, time.perf_counter())

    def steps(self) -> list[Step]:
        assert self._origin is not None
        event, origin_s = self._origin
        steps = []
        for marks, prepared_s in zip(self.marks, self.prepared_s[1:], strict=False):
            verified, extended = marks[2], marks[3]
            steps.append(
                Step(origin_s + verified.seconds_since(event), origin_s + extended.seconds_since(event), prepared_s)
            )
        return steps


def watched(pair: InProcessPair) -> Watch:
    watch = Watch()
    prepare = ScheduleBatch.prepare_for_decode
    forward = Worker.forward

    def note_prepared(self: ScheduleBatch, pool: KvPool) -> bool:
        began_s = time.perf_counter()
        is_prepared = prepare(self, pool)
        if is_prepared:
            watch.prepared_s.append(began_s)
        return is_prepared

    def note_marks(self: Worker, batch: ForwardBatch, **keywords: object) -> WorkerOutput:
        output = forward(self, batch, **keywords)  # type: ignore[arg-type]
        assert output.marks is not None
        watch.marks.append(output.marks.get())
        return output

    ScheduleBatch.prepare_for_decode = note_prepared  # type: ignore[method-assign]
    Worker.forward = note_marks  # type: ignore[method-assign]
    watch.start(pair.decode._forward_stream)
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--no-save", action="store_true", help="print only")
    args = parser.parse_args()
    target = load_target(demo_model_dir(), device="cpu", dtype="bfloat16")
    head = load_draft(resolve_draft("demo"), target=target, device="cpu", dtype="bfloat16")
    target.capture_hidden(head.capture)

    def new_device() -> Device:
        return open_device("cpu", num_threads=1)

    pair = InProcessPair(target, new_device=new_device, draft=head, options=PairOptions(decode_tokens=8192))
    watch = watched(pair)
    for number in range(args.rows):
        sampling = ResolvedSampling(seed=number, max_tokens=args.new_tokens, temperature=0.0)
        pair.submit(str(number), [1, 4093, 198, 1000 + number, 2000 + number], sampling)
    pair.run(bound_s=300.0)
    steps = watch.steps()[: -args.rows]  # leaves out the end, where rows finish and no step follows
    pair.close()
    early = [step for step in steps if step.next_prepared_s < step.extended_s]
    after_ms = 1e3 * statistics.median(step.next_prepared_s - step.verified_s for step in steps)
    before_ms = 1e3 * statistics.median(step.extended_s - step.next_prepared_s for step in steps)
    first_s = steps[len(steps) // 2].verified_s
    run = BenchmarkRun.of("overlap")
    lines = [
        *run.heading(
            "Overlap under speculation",
            f"SmolLM2-135M-Instruct, bfloat16, {args.rows} rows, chains of 4, both engines in one process, a thread "
            "each for scheduling and for the forward.",
        ),
        "",
        f"The next step's scheduling began before draft-extend ended in {len(early)} of {len(steps)} steps, "
        f"{after_ms:.2f} ms after verify ended and {before_ms:.2f} ms before draft-extend did (medians). In the middle "
        "of the run, in ms:",
        "",
        "| verify ended | scheduling of the next step began | draft-extend ended |",
        "|---|---|---|",
    ]
    for step in steps[len(steps) // 2 : len(steps) // 2 + NUM_SHOWN]:
        times = (step.verified_s, step.next_prepared_s, step.extended_s)
        lines.append("| " + " | ".join(f"{1e3 * (moment - first_s):.2f}" for moment in times) + " |")
    table = "\n".join(lines)
    print(table)
    if not args.no_save:
        run.save("overlap", table)
    sys.exit(0 if len(early) >= MIN_SHARE * len(steps) else 1)


if __name__ == "__main__":
    main()
