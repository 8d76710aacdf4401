"""Lends KV instead of copying it: receivers get tickets into the pool's memory, and read it there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from common.device.stream import raise_if_device_failed
from common.kv.pool import KvPool
from common.kv.shared_kv import MAX_LENT_BYTES
from common.kv.shared_pool import SharedPool
from prefill_service.handoff.segments import SegmentSender, SentKv, UnsentKv
from prefill_service.prompt import Prompt


class LendingSender(SegmentSender):
    """Sends parts of KV by lending them. A part needs the pool until the receiver has given it back."""

    def __init__(self, pool: KvPool, memory: SharedPool) -> None:
        """Creates a sender that lends the KV of `pool`, which lies in `memory`."""
        super().__init__(max_segment_bytes=MAX_LENT_BYTES)
        self._pool = pool
        self._memory = memory
        self._queued: deque[UnsentKv] = deque()
        self._lent: dict[int, Prompt] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._queued)

    def poll(self) -> Iterator[SentKv]:
        for part in self._written():
            slots = self._pool.slots_of(part.lease, part.group.name, part.tokens)
            shared = self._memory.lend(part.group.name, part.layers, slots)
            self._lent[shared.ticket.number] = part.prompt
            yield SentKv(part.prompt, replace(part.segment, shared=shared), None)

    def return_segments(self, numbers: Sequence[int]) -> None:
        """Takes segments back that the receiver has finished reading. Segments of ended prompts are ignored."""
        for number in numbers:
            if (prompt := self._lent.pop(number, None)) is not None:
                self._num_unsent[prompt] -= 1

    def forget(self, prompt: Prompt) -> None:
        """Sends no more of this prompt, and forgets its lent segments.

        A receiver that still reads them notices when the slots are reused: their stamps (numbers that are new for each
        row that gets a slot) are then newer than the one in its ticket.
        """
        super().forget(prompt)
        self._lent = {number: borrower for number, borrower in self._lent.items() if borrower is not prompt}

    def _take(self, parts: Sequence[UnsentKv]) -> None:
        self._queued.extend(parts)

    def _written(self) -> list[UnsentKv]:
        """Takes the written parts out of the queue and returns those to lend.

        Adjacent layers of the same tokens are joined into one part.
        """
        parts: list[UnsentKv] = []
        last: dict[tuple[int, str, int], int] = {}
        while self._queued and self._queued[0].written.is_done():
            part = self._queued.popleft()
            raise_if_device_failed(part.written)
            if not self._is_wanted(part):
                continue
            tokens = (id(part.prompt), part.group.name, part.token_start)
            place = last.get(tokens)
            if place is not None and _are_one_loan(parts[place], part):
                parts[place].num_layers += part.num_layers
                self._num_unsent[part.prompt] -= 1
            else:
                last[tokens] = len(parts)
                parts.append(part)
        return parts


def _are_one_loan(first: UnsentKv, following: UnsentKv) -> bool:
    """Returns whether two parts of a row, whose first token is the same, can be lent as one segment.

    They must have the same tokens and adjacent layers, and together must not exceed MAX_LENT_BYTES.
    """
    return (
        following.num_tokens == first.num_tokens
        and following.layer_start == first.layers.stop
        and first.num_bytes + following.num_bytes <= MAX_LENT_BYTES
    )
