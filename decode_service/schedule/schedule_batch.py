"""The decode batch on the schedule side. A forward gets a snapshot of it.

PrebuiltBatch columns ──prepare_for_prebuilt──▶ PREBUILT batch ──process_prebuilt──▶ merge_batch into the running one
running batch ──filter_batch──▶ prepare_for_decode ──snapshot──▶ ForwardBatch, for the worker
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.device.upload import device_copy
from common.kv.pool import KvPool
from common.sampling.state import SamplingBatch, sampling_needs
from common.wire.handoff import PrebuiltBatch
from decode_service.forward.forward_batch import ForwardBatch, ForwardMode, windows
from decode_service.schedule.request import Request
from decode_service.speculate.depth import Depth
from decode_service.speculate.spec_info import SpecInfo


@dataclass(frozen=True, slots=True)
class ReadyRows:
    """Rows of one PrebuiltBatch whose KV has landed: entry i of `columns` indices belongs to reqs[i]."""

    columns: PrebuiltBatch
    entries: NDArray[np.int64]
    reqs: tuple[Request, ...]


class ScheduleBatch:
    """Entry i of `reqs` and of every column is one request; order is kept by every operation.

    `req_pool_indices`, `seq_lens` [B] int64 on the device, `*_cpu` their twins on the host, which never share storage
    with them. A column here is replaced, never written in place: a forward in flight may read it. `spec_info` is None
    without speculation. `draft_lag` [B]: how many tokens the draft head has not read, those of launched steps included.
    What follows from which requests there are is made when it is asked for, and again when entries come or go.
    """

    def __init__(
        self,
        *,
        reqs: list[Request],
        req_pool_indices: Tensor,
        req_pool_indices_cpu: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        draft_lag: NDArray[np.int64],
        forward_mode: ForwardMode,
        sampling_needs: NDArray[np.int64],
    ) -> None:
        self.reqs = reqs
        self.req_pool_indices = req_pool_indices
        self.req_pool_indices_cpu = req_pool_indices_cpu
        self.seq_lens = seq_lens
        self.seq_lens_cpu = seq_lens_cpu
        self.draft_lag = draft_lag
        self.sampling_needs = sampling_needs
        self.forward_mode = forward_mode
        self.out_cache_loc: Tensor | None = None
        self.spec_info: SpecInfo | None = None

    @classmethod
    def empty(cls, torch_device: torch.device) -> ScheduleBatch:
        def nothing(device: torch.device) -> Tensor:
            return torch.empty(0, dtype=torch.int64, device=device)

        host = torch.device("cpu")
        return cls(
            reqs=[],
            req_pool_indices=nothing(torch_device),
            req_pool_indices_cpu=nothing(host),
            seq_lens=nothing(torch_device),
            seq_lens_cpu=nothing(host),
            draft_lag=np.empty(0, np.int64),
            forward_mode=ForwardMode.DECODE,
            sampling_needs=sampling_needs([]),
        )

    @classmethod
    def prepare_for_prebuilt(cls, parts: Sequence[ReadyRows], torch_device: torch.device) -> ScheduleBatch:
        """The rows of `parts` as one batch whose lengths are the KV lengths that came with them."""
        reqs = [req for part in parts for req in part.reqs]
        rows = torch.tensor([req.lease.row for req in reqs if req.lease is not None], dtype=torch.int64)
        assert rows.shape[0] == len(reqs), "a ready request holds a row"
        seq_lens_cpu = torch.from_numpy(np.concatenate([part.columns.seq_lens[part.entries] for part in parts]))
        return cls(
            reqs=reqs,
            req_pool_indices=device_copy(rows, torch_device),
            req_pool_indices_cpu=rows,
            seq_lens=device_copy(seq_lens_cpu, torch_device),
            seq_lens_cpu=seq_lens_cpu,
            draft_lag=np.zeros(len(reqs), np.int64),
            forward_mode=ForwardMode.PREBUILT,
            sampling_needs=sampling_needs([req.sampling for req in reqs]),
        )

    @property
    def is_empty(self) -> bool:
        return not self.reqs

    @property
    def batch_size(self) -> int:
        return len(self.reqs)

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """`req_pool_indices_cpu` as an array, for columns that are not tensors."""
        rows: NDArray[np.int64] = self.req_pool_indices_cpu.numpy()
        return rows

    @cached_property
    def request_ids(self) -> tuple[str, ...]:
        return tuple([req.request_id for req in self.reqs])

    @cached_property
    def undrafted(self) -> tuple[int, ...]:
        """Indices of entries that want no drafts."""
        return tuple([i for i, req in enumerate(self.reqs) if not req.wants_drafts])

    @cached_property
    def sampling(self) -> SamplingBatch:
        """Which entries need which part of sampling; their parameters are on the device, by row."""
        return SamplingBatch.of_needs(self.sampling_needs)

    def _forget_what_follows(self) -> None:
        self.out_cache_loc = None
        for name in ("rows", "request_ids", "undrafted", "sampling"):
            self.__dict__.pop(name, None)

    def set_seq_lens(self, seq_lens: Tensor) -> None:
        """Replace the lengths on the device and the CPU together. `seq_lens` [B] int64 is copied to the host."""
        self.seq_lens = seq_lens
        self.seq_lens_cpu = _host_copy(seq_lens)

    @property
    def num_step_slots(self) -> int:
        """Slots past its committed KV that the next step writes to, for each entry."""
        return 1 if self.spec_info is None else self.spec_info.num_slots

    def num_slots_needed(self, pool: KvPool) -> int:
        """Slots that `prepare_for_decode` takes from the pool."""
        return int(pool.num_missing(self.rows, self.wanted_tokens()).sum())

    def prepare_for_decode(self, pool: KvPool) -> bool:
        """Slots for what the next step writes of each entry, in order of position.

        Without drafts that is one, and the lengths become one longer, as new tensors. With drafts the lengths stay: the
        forward itself finds out by how much they grow, and what it does not commit is overwritten by the next.
        False, and nothing changed, when the pool has too few slots.
        """
        if not pool.grow(self.rows, self.wanted_tokens()):
            return False
        table = pool.rows.req_to_token
        if self.num_step_slots == 1:
            self.out_cache_loc = table[self.req_pool_indices, self.seq_lens]
        else:
            positions = windows(self.seq_lens, self.num_step_slots)
            self.out_cache_loc = table[self.req_pool_indices.unsqueeze(1), positions].flatten()
        if self.spec_info is None or not self.spec_info.has_drafts:
            self.seq_lens = self.seq_lens + 1
            self.seq_lens_cpu = self.seq_lens_cpu + 1
        self.forward_mode = ForwardMode.DECODE
        return True

    def snapshot(self) -> ForwardBatch:
        """What the forward of the prepared step reads: it shares no tensor with this batch."""
        assert self.forward_mode is ForwardMode.DECODE and self.out_cache_loc is not None
        return ForwardBatch.of(
            req_pool_indices=self.req_pool_indices,
            seq_lens=self.seq_lens,
            seq_lens_cpu=self.seq_lens_cpu.numpy(),
            out_cache_loc=self.out_cache_loc,
            sampling=self.sampling,
            spec_info=self.spec_info,
            undrafted=self.undrafted,
            draft_lag=self.draft_lag,
        )

    def wanted_tokens(self) -> NDArray[np.int64]:
        """[B]: tokens that each entry has slots for once its next step is prepared."""
        wanted: NDArray[np.int64] = self.seq_lens_cpu.numpy() + self.num_step_slots
        return wanted

    def filter_batch(self, keep: Sequence[int] | NDArray[np.int64]) -> None:
        """Keep the entries at these indices, ascending."""
        if len(keep) == len(self.reqs):
            return
        keep = np.array(keep, dtype=np.int64)
        keep_cpu = torch.from_numpy(keep)
        keep_device = device_copy(keep_cpu, self.seq_lens.device)
        self.reqs = [self.reqs[i] for i in keep.tolist()]
        self.req_pool_indices = self.req_pool_indices[keep_device]
        self.req_pool_indices_cpu = self.req_pool_indices_cpu[keep_cpu]
        self.seq_lens = self.seq_lens[keep_device]
        self.seq_lens_cpu = self.seq_lens_cpu[keep_cpu]
        self.draft_lag = self.draft_lag[keep]
        self.sampling_needs = self.sampling_needs[keep]
        self._forget_what_follows()

    def merge_batch(self, other: ScheduleBatch) -> None:
        """Append the other batch's entries after this one's."""
        self.reqs = [*self.reqs, *other.reqs]
        self.req_pool_indices = torch.cat([self.req_pool_indices, other.req_pool_indices])
        self.req_pool_indices_cpu = torch.cat([self.req_pool_indices_cpu, other.req_pool_indices_cpu])
        self.seq_lens = torch.cat([self.seq_lens, other.seq_lens])
        self.seq_lens_cpu = torch.cat([self.seq_lens_cpu, other.seq_lens_cpu])
        self.draft_lag = np.concatenate([self.draft_lag, other.draft_lag])
        self.sampling_needs = np.concatenate([self.sampling_needs, other.sampling_needs])
        self._forget_what_follows()

    def check_lengths(self) -> None:
        """Checks I1; raises AssertionError. Synchronises with the device: for debug builds and tests."""
        assert self.seq_lens.data_ptr() != self.seq_lens_cpu.data_ptr() or self.is_empty, "the twins share storage"
        assert torch.equal(self.seq_lens.cpu(), self.seq_lens_cpu), "seq_lens and seq_lens_cpu differ"
        assert torch.equal(self.req_pool_indices.cpu(), self.req_pool_indices_cpu), "req_pool_indices twins differ"


def depth_within(depth: Depth | None, batch: ScheduleBatch, pool: KvPool) -> SpecInfo | None:
    """How deep the batch's next step drafts: no deeper than free slots allow, because drafts are not worth a
    retraction.
    """
    if depth is None or batch.is_empty:
        return None
    num_wanted = batch.batch_size - len(batch.undrafted)
    batch.spec_info = depth.choose(draft_lag=batch.draft_lag, num_wanted=num_wanted)
    if batch.num_slots_needed(pool) > pool.num_free_slots:
        return batch.spec_info.at_depth(0)
    return batch.spec_info


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)
