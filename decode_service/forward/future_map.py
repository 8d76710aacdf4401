"""The relay between iterations, addressed by `req_pool_indices`.

          forward stream                                   schedule side (engine thread)
step N    resolve_forward_inputs ◀── bootstrap ──────────── merge of a prebuilt batch
          forward / verify
          publish(new_seq_lens), publish_ready ───────────▶ resolve_seq_lens ──▶ step N+1 is prepared and launched
          draft-extend
          stash(tokens, seed)
step N+1  resolve_forward_inputs

A step without drafts publishes nothing: its lengths are known when it is launched (publish_nothing).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common.device.cell import Cell
from common.device.stream import Device, Event, Scope, Stream, wait_in_order
from common.kv.layer_group import SeedColumnSpec

_POISON = -1


@dataclass(frozen=True, slots=True)
class RelayPayload:
    """What only the next forward reads: `tokens` [B] int64 (output, or bonus tokens) and the seed columns [B, ...].

    No seed columns where the next forward drafts nothing.
    """

    tokens: Tensor
    seeds: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RelayedInputs:
    """`tokens` [B] int64, all in the vocabulary; `is_invalid` [B] bool marks rows whose relayed token was not."""

    tokens: Tensor
    seeds: Mapping[str, Tensor]
    is_invalid: Tensor


class FutureMap:
    """Every buffer has max_rows + 1 rows, allocated here; row 0 absorbs padding. There is no ring and no counter.

    `relays_lengths`: the worker publishes lengths that the schedule side cannot know (speculation). Without it lengths
    are schedule-deterministic and `resolve_seq_lens` does nothing. `poisons_consumed_rows` overwrites each token as it
    is read, so that a row read twice, or before it was written, is caught as invalid.
    """

    def __init__(
        self,
        *,
        device: Device,
        forward_stream: Stream,
        max_rows: int,
        vocab_size: int,
        relays_lengths: bool,
        seed_columns: tuple[SeedColumnSpec, ...],
        poisons_consumed_rows: bool,
        wait_timeout_s: float,
    ) -> None:
        def rows(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((max_rows + 1, *shape), dtype=dtype, device=device.torch_device)

        self.relays_lengths = relays_lengths
        self.output_tokens = rows(torch.int64)
        self.new_seq_lens_buf = rows(torch.int64)
        self.seeds = {column.name: rows(getattr(torch, column.dtype), *column.row_shape) for column in seed_columns}
        self.publish_ready: Event | None = None
        self._schedule_stream = device.schedule_stream
        self._forward_stream = forward_stream
        self._vocab_size = vocab_size
        self._poisons_consumed_rows = poisons_consumed_rows
        self._wait_timeout_s = wait_timeout_s

    def publish(self, req_pool_indices: Tensor, new_seq_lens: Cell[Tensor], scope: Scope) -> None:
        """Write the lengths the next schedule step needs, and arm the fence it waits on.

        Shapes: both [B] int64. Enqueues on the forward stream, between verify and draft-extend. B == 0 writes nothing
        and arms nothing.
        """
        if req_pool_indices.shape[0] == 0:
            return

        def publish_lengths() -> None:
            self.new_seq_lens_buf[req_pool_indices] = new_seq_lens.get()

        self._forward_stream.enqueue(publish_lengths, scope)
        self.publish_ready = self._forward_stream.record(scope, "publish_ready")

    def publish_nothing(self) -> None:
        """The step launched now grows each row by one token, as the batch already says."""
        self.publish_ready = None

    def lengths_to_come(self) -> Event | None:
        """The event that `resolve_seq_lens` would wait for; None if it need not wait. Schedule side."""
        return None if self.publish_ready is None or self.publish_ready.is_done() else self.publish_ready

    def stash(self, req_pool_indices: Tensor, payload: Cell[RelayPayload], scope: Scope) -> None:
        """Write what only the next forward reads. Shapes: [B, ...]. Enqueues on the forward stream; B == 0 writes
        nothing.

        No fence: the one reader is a later piece of the same stream.
        """
        if req_pool_indices.shape[0] == 0:
            return

        def stash_payload() -> None:
            values = payload.get()
            self.output_tokens.index_copy_(0, req_pool_indices, values.tokens)
            for name, column in values.seeds.items():
                self.seeds[name].index_copy_(0, req_pool_indices, column)

        self._forward_stream.enqueue(stash_payload, scope)

    def resolve_seq_lens(self, req_pool_indices: Tensor) -> Tensor | None:
        """Return the lengths the last verify published for these rows; None where the batch has them already.

        Shapes: both [B] int64. Schedule side, before the next launch. Waits for `publish_ready`, bounded. Rows
        bootstrapped since that verify keep the lengths they came with, which bootstrap wrote to the same rows. The
        batch has its lengths without relayed ones, or where the last step's were known when it was launched.
        """
        if not self.relays_lengths or req_pool_indices.shape[0] == 0 or self.publish_ready is None:
            return None
        self._schedule_stream.wait(self.publish_ready)
        wait_in_order(self.publish_ready, self._wait_timeout_s)  # that step's own end event fails its requests
        return self.new_seq_lens_buf[req_pool_indices]

    def resolve_forward_inputs(self, req_pool_indices: Tensor, *, with_seeds: bool) -> RelayedInputs:
        """Gather the step's input tokens and, if it drafts, seeds. Runs inside a piece on the forward stream, at the
        step's entry.
        """
        tokens = self.output_tokens.index_select(0, req_pool_indices)
        seeds = (
            {name: buffer.index_select(0, req_pool_indices) for name, buffer in self.seeds.items()}
            if with_seeds
            else {}
        )
        if self._poisons_consumed_rows and req_pool_indices.shape[0]:
            self.output_tokens.index_fill_(0, req_pool_indices, _POISON)
        usable = tokens.clamp(0, self._vocab_size - 1)
        return RelayedInputs(usable, seeds, usable != tokens)

    def bootstrap(self, req_pool_indices: Tensor, seq_lens: Tensor, payload: RelayPayload) -> None:
        """Seed rows that no forward has produced: `seq_lens` is their KV's. Schedule side, when a prebuilt batch is
        merged. Shapes: [B, ...]; B == 0 writes nothing.

        Safe beside a forward in flight: a row leaves quarantine only when no forward references it. The launch orders
        it before the next forward. It never touches `publish_ready`, so it never waits for a draft-extend.
        """
        if req_pool_indices.shape[0] == 0:
            return
        self.output_tokens[req_pool_indices] = payload.tokens
        if self.relays_lengths:
            self.new_seq_lens_buf[req_pool_indices] = seq_lens
        for name, buffer in self.seeds.items():
            buffer[req_pool_indices] = payload.seeds[name]
