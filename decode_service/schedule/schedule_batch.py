"""The decode batch on the schedule side. Each forward gets a snapshot of it.

PrebuiltBatch columns ──prepare_for_prebuilt──▶ prebuilt batch ──process_prebuilt──▶ merge_batch into the running one
running batch ──filter_batch──▶ prepare_for_decode ──snapshot──▶ ForwardBatch, for the worker
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.device.upload import device_copy
from common.grammar.matcher import NOT_FORCED
from common.kv.pool import KvPool
from common.sampling.state import SamplingBatch, sampling_needs
from common.wire.handoff import PrebuiltBatch
from decode_service.forward.forward_batch import ForwardBatch, positions_from
from decode_service.schedule.request import Request
from decode_service.speculate.depth import Depth
from decode_service.speculate.spec_info import NO_DRAFTS, Unread


@dataclass(frozen=True, slots=True)
class ReadyRows:
    """Rows of one PrebuiltBatch whose KV has landed. Request `reqs[i]` has entry `entries[i]` of the `columns`."""

    columns: PrebuiltBatch
    entries: NDArray[np.int64]
    reqs: tuple[Request, ...]


class ScheduleBatch:
    """The requests that decode together, as columns: entry i of `reqs` and of every column is one request.

    Every operation keeps the order of entries. `req_pool_indices` and `seq_lens` are [B] int64 on the device. `*_cpu`
    are their copies on the host and never share storage with them. A column is replaced, never written in place,
    because a forward in flight may read it. `forced` maps requests to the tokens that their grammars force next;
    requests without any are left out. Properties derived from `reqs` are cached until entries come or go.
    """

    def __init__(
        self,
        *,
        reqs: list[Request],
        req_pool_indices: Tensor,
        req_pool_indices_cpu: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        sampling_needs: NDArray[np.int64],
    ) -> None:
        self.reqs = reqs
        self.req_pool_indices = req_pool_indices
        self.req_pool_indices_cpu = req_pool_indices_cpu
        self.seq_lens = seq_lens
        self.seq_lens_cpu = seq_lens_cpu
        self.sampling_needs = sampling_needs
        self.out_cache_loc: Tensor | None = None
        self.spec_info = NO_DRAFTS
        self.forced: Mapping[Request, Sequence[int]] = {}

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
            sampling_needs=sampling_needs([]),
        )

    @classmethod
    def prepare_for_prebuilt(cls, parts: Sequence[ReadyRows], torch_device: torch.device) -> ScheduleBatch:
        """Builds one batch of the rows in `parts`. Its lengths are the KV lengths that came with the rows."""
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
        """`req_pool_indices_cpu` as a NumPy array, to index columns that are not tensors."""
        rows: NDArray[np.int64] = self.req_pool_indices_cpu.numpy()
        return rows

    @cached_property
    def request_ids(self) -> tuple[str, ...]:
        return tuple([req.request_id for req in self.reqs])

    @cached_property
    def undrafted(self) -> tuple[int, ...]:
        """The indices of entries whose requests want no drafts."""
        return tuple([i for i, req in enumerate(self.reqs) if not req.wants_drafts])

    @cached_property
    def sampling(self) -> SamplingBatch:
        """The indices of the entries that need each optional part of sampling, such as penalties or log-probabilities.

        The sampling parameters themselves are on the device, by pool row.
        """
        return SamplingBatch.of_needs(self.sampling_needs)

    @property
    def num_forced(self) -> NDArray[np.int64]:
        """The number of tokens, [B], that each request's grammar forces next."""
        if not self.forced:
            return np.zeros(self.batch_size, np.int64)
        return np.array([len(self.forced.get(req, ())) for req in self.reqs], np.int64)

    def _forced_drafts(self) -> NDArray[np.int64] | None:
        """Returns the forced tokens that the step drafts, [B, levels], or None if there are none."""
        if not self.spec_info.has_drafts or not self.forced:
            return None
        columns = np.full((self.batch_size, self.spec_info.num_steps), NOT_FORCED, np.int64)
        for column, req in zip(columns, self.reqs, strict=True):
            run = self.forced.get(req, ())[: len(column)]
            column[: len(run)] = run
        return columns

    def _forget_what_follows(self) -> None:
        self.out_cache_loc = None
        for name in ("rows", "request_ids", "undrafted", "sampling"):
            self.__dict__.pop(name, None)

    def set_seq_lens(self, seq_lens: Tensor) -> None:
        """Replaces the lengths on the device and the CPU together. `seq_lens` [B] int64 is copied to the host."""
        self.seq_lens = seq_lens
        self.seq_lens_cpu = _host_copy(seq_lens)

    @property
    def num_step_slots(self) -> int:
        """The number of slots that the next step writes for each entry, past its committed KV."""
        return self.spec_info.num_slots

    def choose_depth(self, depth: Depth, pool: KvPool, unread: Unread) -> None:
        """Sets the speculation of the next step. `unread` are the tokens that the drafter has not read.

        If the chosen depth needs more slots than are free, the step drafts nothing: drafts are not worth a retraction.
        """
        if self.is_empty:
            self.spec_info = NO_DRAFTS
            return
        num_wanted = self.batch_size - len(self.undrafted)
        self.spec_info = depth.choose(unread=unread, num_wanted=num_wanted, num_forced=self.num_forced)
        if self.spec_info.has_drafts and pool.lacks(self.rows, self.wanted_tokens()):
            self.spec_info = self.spec_info.at_depth(0)

    def prepare_for_decode(self, pool: KvPool) -> bool:
        """Reserves the slots that the next step writes and sets `out_cache_loc`, each entry's slots in order of
        position.

        Without drafts an entry gets one slot, and its length grows by one in new tensors. With drafts the lengths stay:
        the forward finds out how many tokens it commits, and the next step overwrites the slots of rejected drafts.
        Returns False and changes nothing if the pool has too few slots.
        """
        if not pool.grow(self.rows, self.wanted_tokens()):
            return False
        table = pool.rows.req_to_token
        if self.num_step_slots == 1:
            self.out_cache_loc = table[self.req_pool_indices, self.seq_lens]
        else:
            positions = positions_from(self.seq_lens, self.num_step_slots)
            self.out_cache_loc = table[self.req_pool_indices.unsqueeze(1), positions].flatten()
        if not self.spec_info.has_drafts:
            self.seq_lens = self.seq_lens + 1
            self.seq_lens_cpu = self.seq_lens_cpu + 1
        return True

    def snapshot(self) -> ForwardBatch:
        """Returns the input of the prepared step's forward. It shares no tensor with this batch."""
        assert self.out_cache_loc is not None
        return ForwardBatch.of(
            req_pool_indices=self.req_pool_indices,
            rows=self.rows.copy(),
            seq_lens=self.seq_lens,
            seq_lens_cpu=self.seq_lens_cpu.numpy(),
            out_cache_loc=self.out_cache_loc,
            sampling=self.sampling,
            spec_info=self.spec_info,
            undrafted=self.undrafted,
            forced=self._forced_drafts(),
        )

    def wanted_tokens(self) -> NDArray[np.int64]:
        """Returns, for each entry [B], how many slots its row must have in the next step, in all."""
        wanted: NDArray[np.int64] = self.seq_lens_cpu.numpy() + self.num_step_slots
        return wanted

    def filter_batch(self, keep: Sequence[int] | NDArray[np.int64]) -> None:
        """Keeps only the entries at the indices `keep`, which are ascending."""
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
        self.sampling_needs = self.sampling_needs[keep]
        self._forget_what_follows()

    def merge_batch(self, other: ScheduleBatch) -> None:
        """Appends the other batch's entries after this one's."""
        self.reqs = [*self.reqs, *other.reqs]
        self.req_pool_indices = torch.cat([self.req_pool_indices, other.req_pool_indices])
        self.req_pool_indices_cpu = torch.cat([self.req_pool_indices_cpu, other.req_pool_indices_cpu])
        self.seq_lens = torch.cat([self.seq_lens, other.seq_lens])
        self.seq_lens_cpu = torch.cat([self.seq_lens_cpu, other.seq_lens_cpu])
        self.sampling_needs = np.concatenate([self.sampling_needs, other.sampling_needs])
        self._forget_what_follows()

    def check_lengths(self) -> None:
        """Asserts that the device and host copies of the columns agree and share no storage (invariant I1).

        It synchronises with the device, so only debug builds and tests call it.
        """
        assert self.seq_lens.data_ptr() != self.seq_lens_cpu.data_ptr() or self.is_empty, "the twins share storage"
        assert torch.equal(self.seq_lens.cpu(), self.seq_lens_cpu), "seq_lens and seq_lens_cpu differ"
        assert torch.equal(self.req_pool_indices.cpu(), self.req_pool_indices_cpu), "req_pool_indices twins differ"


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)
