"""The relay of lengths, tokens and draft seeds between iterations, in buffers indexed by `req_pool_indices`.

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

from common.device.stream import Cell, Device, Event, Scope, Stream, wait_in_order
from common.kv.layer_group import SeedColumnSpec

_POISON = -1


@dataclass(frozen=True, slots=True)
class RelayPayload:
    """The values that only the next forward reads.

    `tokens` [B] int64 are the last committed tokens, whose KV is not computed yet. `seeds` are the draft seeds, as
    columns [B, ...] by name; empty if the next forward drafts nothing.
    """

    tokens: Tensor
    seeds: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RelayedInputs:
    """The relayed values that a forward starts from: each row's input token and draft seed.

    `tokens` [B] int64 are all in the vocabulary. If a relayed token was not, another one takes its place, and
    `is_invalid` [B] bool marks the row. `seeds` are columns [B, ...] by name; empty if the forward drafts nothing.
    """

    tokens: Tensor
    seeds: Mapping[str, Tensor]
    is_invalid: Tensor


class FutureMap:
    """Relays each row's length, token and draft seed from one step to the next.

    Every buffer has max_rows + 1 rows and is allocated once; row 0 absorbs padding. `relays_lengths` means that the
    worker publishes lengths that the schedule side cannot know (speculation). Without it the schedule side knows all
    lengths, and `resolve_seq_lens` returns None. `poisons_consumed_rows` overwrites each token when it is read, so that
    a second read without a write in between is detected as invalid.
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
        """Writes the lengths that the next schedule step needs, and records `publish_ready`, for which that step waits.

        Shapes: both [B] int64. Enqueues on the forward stream, between verify and draft-extend. For B == 0 it writes
        and records nothing.
        """
        if req_pool_indices.shape[0] == 0:
            return

        def publish_lengths() -> None:
            self.new_seq_lens_buf[req_pool_indices] = new_seq_lens.get()

        self._forward_stream.enqueue(publish_lengths, scope)
        self.publish_ready = self._forward_stream.record(scope, "publish_ready")

    def publish_nothing(self) -> None:
        """Declares that the step being launched publishes no lengths.

        It drafts nothing, so each row grows by one token, and the schedule side has counted that token already.
        """
        self.publish_ready = None

    def lengths_to_come(self) -> Event | None:
        """Returns the event that `resolve_seq_lens` would wait for, or None. Only the schedule side calls it."""
        return None if self.publish_ready is None or self.publish_ready.is_done() else self.publish_ready

    def stash(self, req_pool_indices: Tensor, payload: Cell[RelayPayload], scope: Scope) -> None:
        """Writes the values that only the next forward reads. Shapes: [B, ...].

        Enqueues on the forward stream; for B == 0 it writes nothing. It needs no event, because the only reader is
        later work on the same stream.
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
        """Returns the lengths that the last verify published for these rows, or None if the batch must keep its
        lengths.

        Shapes: both [B] int64. The schedule side calls it before the next launch. It waits for `publish_ready`, and
        raises DeviceTimeout after `wait_timeout_s`. Rows bootstrapped since that verify have the lengths that bootstrap
        wrote. The batch keeps its lengths if `relays_lengths` is False, or if the last step published none, because it
        had no drafts or failed. The buffer may then hold outdated lengths.
        """
        if not self.relays_lengths or req_pool_indices.shape[0] == 0 or self.publish_ready is None:
            return None
        self._schedule_stream.wait(self.publish_ready)
        wait_in_order(self.publish_ready, self._wait_timeout_s)
        if self.publish_ready.error is not None:  # that step's own end event reports it
            return None
        return self.new_seq_lens_buf[req_pool_indices]

    def resolve_forward_inputs(self, req_pool_indices: Tensor, *, with_seeds: bool) -> RelayedInputs:
        """Returns the step's input tokens and, if `with_seeds`, the draft seeds of its rows. Call it on the forward
        stream when the step begins.
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
        """Writes the first token, the draft seed and the KV length of rows that join the batch. Shapes: [B, ...].

        The schedule side calls it when a prebuilt batch is merged; for B == 0 it writes nothing. It is safe while a
        forward is in flight, because no such forward uses these rows: a row leaves quarantine only after the last one
        that does. The next forward waits for these writes, because its launch makes it wait for the schedule side.
        Bootstrap does not use `publish_ready`, so it waits for no forward.
        """
        if req_pool_indices.shape[0] == 0:
            return
        self.output_tokens[req_pool_indices] = payload.tokens
        if self.relays_lengths:
            self.new_seq_lens_buf[req_pool_indices] = seq_lens
        for name, buffer in self.seeds.items():
            buffer[req_pool_indices] = payload.seeds[name]
