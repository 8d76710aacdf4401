"""Drives the relay without an engine, on a scripted device.

The relay is the FutureMap: the device tensors through which a decode step passes tokens and lengths to the next. The
steps here relay lengths as speculation does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.device.stream import Cell, Scope
from common.kv.kv_shard import OneDevice
from common.kv.layer_group import SeedColumnSpec
from common.kv.pool import KvPool
from common.sampling.params import ResolvedSampling
from common.sampling.state import sampling_needs
from decode_service.forward.future_map import FutureMap, RelayPayload
from decode_service.messages import Submit
from decode_service.schedule.request import Request
from decode_service.schedule.schedule_batch import ScheduleBatch
from tests.engine.tags import GROUP, VOCAB_SIZE
from tests.support.scripted_device import ScriptedDevice, ScriptedStream

HIDDEN = SeedColumnSpec("hidden_states", "float32", (2,))


def make_batch(rows: Sequence[int], seq_lens: Sequence[int]) -> ScheduleBatch:
    """Returns a batch of one request for each row, named after the row."""
    sampling = ResolvedSampling(seed=0, max_tokens=8, temperature=0.0)
    return ScheduleBatch(
        reqs=[Request.of(Submit(f"row {row}", (1,), 1, sampling), arrival=row, now_s=0.0) for row in rows],
        req_pool_indices=torch.tensor(rows, dtype=torch.int64),
        req_pool_indices_cpu=torch.tensor(rows, dtype=torch.int64),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int64),
        seq_lens_cpu=torch.tensor(seq_lens, dtype=torch.int64),
        sampling_needs=sampling_needs([sampling] * len(rows)),
    )


def make_pool(*, max_rows: int = 4, max_kv_tokens: int = 32) -> KvPool:
    return KvPool(
        groups=[GROUP],
        max_rows=max_rows,
        max_kv_tokens=max_kv_tokens,
        max_tokens_per_row=16,
        tensors=OneDevice(torch.device("cpu")),
    )


def payload_of(tokens: Sequence[int]) -> RelayPayload:
    """Returns a relay payload for these tokens. The hidden state of each row's seed is its token, twice."""
    column = torch.tensor(tokens, dtype=torch.float32)
    return RelayPayload(torch.tensor(tokens, dtype=torch.int64), {HIDDEN.name: column.unsqueeze(1).repeat(1, 2)})


@dataclass(frozen=True)
class Relay:
    device: ScriptedDevice
    forward: ScriptedStream
    future_map: FutureMap

    def launch(self, rows: Sequence[int], new_seq_lens: Sequence[int], tokens: Sequence[int]) -> None:
        """Launches one speculative step: verify, publish, draft_extend and stash. None of it has run when this
        returns.
        """
        scope = Scope("step")
        req_pool_indices = torch.tensor(rows, dtype=torch.int64)
        relayed: Cell[Tensor] = Cell()
        payload: Cell[RelayPayload] = Cell()

        def verify() -> None:
            relayed.set(torch.tensor(new_seq_lens, dtype=torch.int64))

        def draft_extend() -> None:
            payload.set(payload_of(tokens))

        if rows:
            self.forward.enqueue(verify, scope)
        self.future_map.publish(req_pool_indices, relayed, scope)
        if rows:
            self.forward.enqueue(draft_extend, scope)
        self.future_map.stash(req_pool_indices, payload, scope)

    def bootstrap(self, rows: Sequence[int], seq_lens: Sequence[int], tokens: Sequence[int]) -> None:
        batch = make_batch(rows, seq_lens)
        self.future_map.bootstrap(batch.req_pool_indices, batch.seq_lens, payload_of(tokens))

    def resolve(self, batch: ScheduleBatch) -> None:
        """Takes the published lengths into the batch, as the scheduler does."""
        published = self.future_map.resolve_seq_lens(batch.req_pool_indices)
        if published is not None:
            batch.set_seq_lens(published)


def make_relay(
    *,
    device: ScriptedDevice | None = None,
    max_rows: int = 4,
    poisons_consumed_rows: bool = False,
) -> Relay:
    device = device or ScriptedDevice()
    forward = device.new_stream("forward")
    future_map = FutureMap(
        device=device,
        forward_stream=forward,
        max_rows=max_rows,
        vocab_size=VOCAB_SIZE,
        relays_lengths=True,
        seed_columns=(HIDDEN,),
        poisons_consumed_rows=poisons_consumed_rows,
        wait_timeout_s=0.0,
    )
    return Relay(device, forward, future_map)
