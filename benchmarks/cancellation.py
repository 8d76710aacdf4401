"""Measures how soon both services have freed everything after a client has left, for each phase of its request.

python -m benchmarks.cancellation
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from baton.client import EventStream
from baton.events import Delta
from baton.local_pair import LocalPair
from tests.support.models import save_tiny_model
from tests.support.running_pair import RunningPair, running_pair, wait_until

NUM_SAMPLES = 5
FREE_BOUND_S = 30.0
PROMPT_TOKENS = 1500
CHUNK_TOKENS = 128
NEW_TOKENS = 2000
NUM_TRIES = 20


class Phase(StrEnum):
    """The phase of a request in which its client leaves."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"  # after the whole prompt was computed
    DECODING = "decoding"


@dataclass(frozen=True, slots=True)
class CancellationRig:
    """A pair that is slow enough to catch a request in each phase. Its decode service has a single row."""

    pair: RunningPair

    def catch(self, phase: Phase, *, on_try: Callable[[], None] = lambda: None) -> tuple[EventStream, ...]:
        """Brings a request into `phase` and returns its stream. The pair must hold nothing before.

        If a transfer ends before it is noticed, it is tried again with another request. `on_try` is called before each
        try, while the pair holds nothing.

        For QUEUED it returns two streams, to be closed in this order: the queued request's, and that of the running
        request that it waits for.
        """
        on_try()
        stream = self.generate()
        match phase:
            case Phase.PREFILLING:
                wait_until(self._is_prefilling, about=self.pair.prefill_load)
            case Phase.TRANSFERRING:
                for _ in range(NUM_TRIES):
                    if self._comes_to_transfer():
                        break
                    stream.close()
                    wait_until(self.pair.holds_nothing, about=self.pair.load)
                    on_try()
                    stream = self.generate()
                else:
                    raise AssertionError(f"the transfer was over {NUM_TRIES} times before anybody looked")
            case Phase.DECODING:
                self._read_first_token(stream)
            case Phase.QUEUED:
                self._read_first_token(stream)
                queued = self.generate()
                wait_until(lambda: self.pair.load().num_queued == 1, about=self.pair.load)
                return queued, stream
        return (stream,)

    def generate(self, *, timeout_s: float | None = None) -> EventStream:
        """Starts a request that takes long in every phase."""
        prompt = [10 + place % 240 for place in range(PROMPT_TOKENS)]
        return self.pair.client.generate(
            token_ids=prompt,
            timeout_s=timeout_s,
            max_tokens=NEW_TOKENS,
            ignore_eos=True,
            temperature=0.0,
            cache_prompt=False,
        )

    def _is_prefilling(self) -> bool:
        return self.pair.prefill_load().num_computing > 0

    def _comes_to_transfer(self) -> bool:
        """Waits until the request's prompt is computed and its KV is still being transferred.

        Returns False if the transfer ended unseen, between two looks at the load, and the request is running already.
        """

        def is_only_transferring() -> bool:
            return self.pair.load().rows.transferring > 0 and self.pair.prefill_load().num_computing == 0

        wait_until(lambda: is_only_transferring() or self.pair.load().rows.running > 0, about=self.pair.load)
        return self.pair.load().rows.running == 0

    def _read_first_token(self, stream: EventStream) -> None:
        assert any(isinstance(event, Delta) for event in stream), "no token came"


@contextmanager
def cancellation_rig(directory: Path, *, kind: Callable[..., LocalPair] = LocalPair) -> Iterator[CancellationRig]:
    """Runs a pair whose model has 64 KiB of KV per token. `kind` starts its services.

    Its KV segments arrive one at a time over gRPC, so the transfer takes longer than the computation.
    """
    model = save_tiny_model(directory, "llama", num_hidden_layers=8, num_key_value_heads=4, head_dim=256)
    with running_pair(
        model,
        kind=kind,
        shared_args=("--max-kv-tokens=8192",),
        prefill_args=("--kv-transport=grpc", "--max-segment-bytes=65536", f"--chunk-tokens={CHUNK_TOKENS}"),
        decode_args=("--receive-budget-bytes=1", "--max-rows=1"),
    ) as pair:
        yield CancellationRig(pair)


def measure_cancellation() -> dict[str, float]:
    """Returns, for each phase, the median seconds from dropping the stream until both services report an empty load."""
    with tempfile.TemporaryDirectory() as directory, cancellation_rig(Path(directory)) as rig:
        return {phase.value: statistics.median(_samples(rig, phase)) for phase in Phase}


def _samples(rig: CancellationRig, phase: Phase) -> list[float]:
    samples = []
    for _ in range(NUM_SAMPLES):
        streams = rig.catch(phase)
        start_s = time.perf_counter()
        for stream in streams:
            stream.close()
        samples.append(_seconds_until(rig.pair.holds_nothing, start_s))
    return samples


def _seconds_until(condition: Callable[[], bool], start_s: float) -> float:
    """Polls `condition` until it is true, and returns the seconds since `start_s`.

    Polls without a pause, because the time is only a few polls long.
    """
    while not condition():
        assert time.perf_counter() - start_s < FREE_BOUND_S, "what the client left is still held"
    return time.perf_counter() - start_s


if __name__ == "__main__":
    for name, seconds in measure_cancellation().items():
        print(f"{name}: {seconds:.3f} s")
