"""A step of decoding, from its launch to its results.

LaunchedStep ──seal──▶ SealedStep ──await_end──▶ EndedStep

Each state has all that the one before it has. Results and figures can be read from an EndedStep only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from common.device.stream import Cell, Device, Scope, Stream, wait_in_order
from common.device.stream import Event as StreamEvent
from common.sampling.operators import Sampled, sampled_to_host, unpack_logprobs
from common.telemetry.stats import MaskStats, SpeculationStats
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.forward.worker import WorkerOutput
from decode_service.schedule.request import Request


@dataclass(frozen=True, slots=True)
class RowResults:
    """The results of a step's rows, as columns. Row b gains the first `accept_lens[b]` tokens of `token_ids[b]`.

    `token_ids` is [B, W] int64 and `accept_lens` [B]. `are_invalid` [B] bool marks rows whose relayed input or logits
    were unusable; the first `num_sound[b]` of such a row's tokens are sound. `logprobs` [B, W] of TokenLogprobs has
    None for rows that want none; it is None if no row wants any.
    """

    token_ids: NDArray[np.int64]
    accept_lens: NDArray[np.int64]
    are_invalid: NDArray[np.bool_]
    num_sound: NDArray[np.int64]
    logprobs: NDArray[np.object_] | None = None


@dataclass(frozen=True, slots=True)
class _HostResults:
    """A step's results as tensors on the host. `accept_lens` is None if each entry has exactly one token."""

    sampled: Sampled
    accept_lens: Tensor | None
    is_invalid: Tensor


@dataclass(frozen=True, kw_only=True)
class LaunchedStep:
    """A step whose forward is enqueued. `output.draw` has still to be called, if it is not None.

    `serials` [B] are the numbers that RunningRows gave `reqs` for their stay in their rows; a request that has left its
    row since the launch gets no results.
    """

    scope: Scope
    batch: ForwardBatch
    reqs: tuple[Request, ...]
    request_ids: tuple[str, ...]
    serials: NDArray[np.int64]
    output: WorkerOutput
    launched_s: float

    @property
    def rows(self) -> NDArray[np.int64]:
        """The pool rows [B] in which `reqs` run."""
        return self.batch.rows

    def seal(
        self, *, device: Device, stream: Stream, previous_end: StreamEvent | None, mask_s: float = 0.0
    ) -> SealedStep:
        """Enqueues the copy of the results to the host, and records the step's end.

        `previous_end` is the end of the step in flight, or None. `mask_s` is how long this step's masks took to
        compute.
        """
        host: Cell[_HostResults] = Cell()
        output = self.output
        sampled, accept_lens, is_invalid = output.sampled, output.accept_lens, output.is_invalid

        def copy_results() -> None:
            host.set(
                _HostResults(
                    sampled_to_host(device, sampled.get()),
                    None if accept_lens is None else device.to_host(accept_lens.get()),
                    device.to_host(is_invalid.get()),
                )
            )

        stream.enqueue(copy_results, self.scope)
        kept = vars(self)
        if not device.runs_pieces_beside:  # otherwise the device's thread would stop to free finished objects
            kept = {**kept, "output": replace(output, kept=())}
        end = stream.record(self.scope, "the end")
        return SealedStep(**kept, host=host, end=end, previous_end=previous_end, mask_s=mask_s)


@dataclass(frozen=True, kw_only=True)
class SealedStep(LaunchedStep):
    """A step whose work is all enqueued. It keeps every tensor and cell of the step alive until the event `end`."""

    host: Cell[_HostResults]
    end: StreamEvent
    previous_end: StreamEvent | None
    mask_s: float

    def await_end(self, timeout_s: float, *, followed_by: LaunchedStep | None) -> EndedStep:
        """Waits for the step's end. Raises the errors of `Event.synchronize`.

        It waits first until the inputs of the step `followed_by` are prepared. Otherwise the Python code that prepares
        them would compete for the interpreter with the code that takes these results.
        """
        if followed_by is not None and (prepared := followed_by.output.prepared) is not None:
            wait_in_order(prepared, timeout_s)  # a failure is reported by that step's own end event
        self.end.synchronize(timeout_s)
        return EndedStep(**vars(self))


@dataclass(frozen=True, kw_only=True)
class EndedStep(SealedStep):
    """A step whose results are on the host."""

    @cached_property
    def speculation(self) -> SpeculationStats | None:
        """The step's drafting and verification figures, or None without speculation."""
        batch, host = self.batch, self.host.get()
        if self.output.marks is None:
            return None
        begin, drafted, verified, read = self.output.marks.get()
        accept_lens = np.ones_like(self.rows) if host.accept_lens is None else host.accept_lens.numpy()
        num_forced = batch.num_forced
        if batch.undrafted:
            accept_lens, num_forced = (np.delete(each, batch.undrafted) for each in (accept_lens, num_forced))
        is_sound = (accept_lens >= 1) & (accept_lens <= batch.max_accept_len)  # a row with any other length fails
        accept_lens, num_forced = accept_lens[is_sound], num_forced[is_sound]
        return SpeculationStats(
            num_levels=batch.spec_info.num_steps,
            accept_lens=tuple(accept_lens.tolist()),
            num_forced=tuple(num_forced.tolist()) if batch.forced is not None else (),
            draft_s=drafted.seconds_since(begin),
            verify_s=verified.seconds_since(drafted),
            extend_s=read.seconds_since(verified),
            idle_s=None if self.previous_end is None else begin.seconds_since(self.previous_end),
        )

    @property
    def masks(self) -> MaskStats | None:
        """The cost of the step's masks, or None if no grammar constrains its draws."""
        if self.output.masked is None:
            return None
        computed, drawn = self.output.masked.marks.get()
        return MaskStats(int(self.batch.sampling.constrained.size), self.mask_s, drawn.seconds_since(computed))

    def results(self) -> RowResults:
        """Returns the step's results as columns."""
        host, batch = self.host.get(), self.batch
        width = batch.max_accept_len
        are_unusable = host.sampled.is_invalid.numpy()
        if host.accept_lens is None:
            accept_lens = num_sound = (~are_unusable).astype(np.int64)
        else:
            accept_lens = host.accept_lens.numpy()
            are_accepted = np.arange(width) < accept_lens[:, None]
            are_unusable = are_unusable.reshape(-1, width) & are_accepted
            num_sound = are_unusable.argmax(axis=1)  # of rows that have an unusable one; others have no need of it
            is_impossible = (accept_lens < 1) | (accept_lens > width)
            num_sound[is_impossible] = 0
            are_unusable = np.logical_or.reduce(are_unusable, axis=1) | is_impossible
        logprobs = None
        if batch.sampling.with_logprobs.size:
            logprobs = unpack_logprobs(host.sampled, batch.sampling, width=width)
        return RowResults(
            token_ids=host.sampled.token_ids.numpy().reshape(-1, width),
            accept_lens=accept_lens,
            are_invalid=host.is_invalid.numpy() | are_unusable,
            num_sound=np.where(host.is_invalid.numpy(), 0, num_sound),
            logprobs=logprobs,
        )
