"""A launched step until its results are taken, and the form in which they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from common.device.cell import Cell
from common.device.stream import Device, Event, Scope, Stream
from common.device.upload import device_copy
from common.kv.pool import RowLease
from common.model.logprobs import unpack_logprobs
from common.model.sampling import Sampled, sampled_to_host
from common.model.sampling_params import TokenLogprobs
from common.telemetry.step_stats import SpeculationStats
from decode_service.future_map import RelayPayload
from decode_service.request import Request
from decode_service.schedule_batch import ForwardBatch, ReadyRows
from decode_service.worker import WorkerOutput


@dataclass(frozen=True, slots=True)
class RowResult:
    """One row's outcome of a step: the tokens it commits, with a log-probability each or none at all.

    `is_invalid`: its relayed input or its logits were not usable. `was_drafted_for`: its drafts counted.
    """

    token_ids: tuple[int, ...]
    is_invalid: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
    was_drafted_for: bool = False


@dataclass(frozen=True, slots=True)
class _HostResults:
    sampled: Sampled
    accept_lens: Tensor
    is_invalid: Tensor


@dataclass(frozen=True)
class StepInFlight:
    """Holds every tensor and cell handed to the stream until `end`, after stash and the results' copy to the host.

    `leases[i]` is the row `reqs[i]` ran with: a request that no longer holds it has no part in the results.
    `previous_end` is that of the step in flight at the launch.
    """

    batch: ForwardBatch
    reqs: tuple[Request, ...]
    leases: tuple[RowLease, ...]
    output: WorkerOutput
    host: Cell[_HostResults]
    end: Event
    launched_s: float
    previous_end: Event | None

    @classmethod
    def seal(
        cls,
        *,
        device: Device,
        stream: Stream,
        scope: Scope,
        batch: ForwardBatch,
        reqs: tuple[Request, ...],
        output: WorkerOutput,
        launched_s: float,
        previous: StepInFlight | None,
    ) -> StepInFlight:
        """Enqueue the copy of the results behind the step's other pieces, and its end event."""
        host: Cell[_HostResults] = Cell()

        def copy_results() -> None:
            sampled = output.sampled.get()
            host.set(
                _HostResults(
                    sampled_to_host(device, sampled),
                    device.to_host(output.accept_lens.get()),
                    device.to_host(output.is_invalid.get()),
                )
            )

        stream.enqueue(copy_results, scope)
        leases = tuple(req.lease for req in reqs if req.lease is not None)
        assert len(leases) == len(reqs)
        previous_end = None if previous is None else previous.end
        return cls(batch, reqs, leases, output, host, stream.record(scope), launched_s, previous_end)

    @cached_property
    def speculation(self) -> SpeculationStats | None:
        """Behind `end` only. None without speculation."""
        if self.batch.spec_info is None:
            return None
        begin, drafted, verified, extended = self.output.marks
        accept_lens = self.host.get().accept_lens.tolist()
        return SpeculationStats(
            num_levels=self.batch.spec_info.num_steps,
            accept_lens=tuple(accept_lens[i] for i in range(len(self.reqs)) if i not in self.batch.undrafted),
            draft_s=drafted.seconds_since(begin),
            verify_s=verified.seconds_since(drafted),
            extend_s=extended.seconds_since(verified),
            idle_s=None if self.previous_end is None else begin.seconds_since(self.previous_end),
        )

    def results(self) -> list[RowResult]:
        """Behind `end` only."""
        host = self.host.get()
        width = self.batch.max_accept_len
        wanted = [req.sampling.num_logprobs for req in self.reqs for _ in range(width)]
        logprobs = unpack_logprobs(host.sampled, self.batch.sampling.repeated(width), wanted)
        tokens = host.sampled.token_ids.tolist()
        results = []
        for i, (num_accepted, is_invalid) in enumerate(
            zip(host.accept_lens.tolist(), host.is_invalid.tolist(), strict=True)
        ):
            run = slice(i * width, i * width + num_accepted)
            entries = tuple(entry for entry in logprobs[run] if entry is not None)
            was_drafted_for = self.batch.spec_info is not None and i not in self.batch.undrafted
            results.append(RowResult(tuple(tokens[run]), is_invalid, entries, was_drafted_for))
        return results


def first_token_payload(
    parts: Sequence[ReadyRows], seeds: Mapping[str, Tensor], torch_device: torch.device
) -> RelayPayload:
    """What bootstrap writes for the rows of `parts`, in their order: first tokens and seed columns."""
    tokens = np.concatenate([part.columns.first_token_ids[part.entries] for part in parts])
    columns = {
        name: device_copy(
            torch.from_numpy(np.concatenate([part.columns.seed_columns[name][part.entries] for part in parts])).view(
                buffer.dtype  # numpy has no bfloat16: the column holds its bits
            ),
            torch_device,
        )
        for name, buffer in seeds.items()
    }
    return RelayPayload(device_copy(torch.from_numpy(tokens), torch_device), columns)
