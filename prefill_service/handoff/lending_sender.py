"""Lends KV instead of copying it: receivers get tickets into the pool's memory, and read it there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from common.device.stream import raise_if_device_failed
from common.kv.pool import KvPool
from common.kv.shared_kv import MAX_LENT_BYTES
from common.kv.shared_pool import SharedPool
from prefill_service.handoff.piece import Piece, PieceSender, SentPiece
from prefill_service.prompt import Prompt


class LendingSender(PieceSender):
    """Sends pieces of KV by lending them. A piece needs the pool until the receiver has given it back."""

    def __init__(self, pool: KvPool, memory: SharedPool) -> None:
        """Creates a sender that lends the KV of `pool`, which lies in `memory`."""
        super().__init__(max_segment_bytes=MAX_LENT_BYTES)
        self._pool = pool
        self._memory = memory
        self._queued: deque[Piece] = deque()
        self._lent: dict[int, Prompt] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._queued)

    def poll(self) -> Iterator[SentPiece]:
        for piece in self._written():
            slots = self._pool.slots_of(piece.lease, piece.group.name, piece.tokens)
            shared = self._memory.lend(piece.group.name, piece.layers, slots)
            self._lent[shared.ticket.number] = piece.prompt
            yield SentPiece(piece.prompt, replace(piece.segment, shared=shared), None)

    def return_segments(self, numbers: Sequence[int]) -> None:
        """Takes segments back that the receiver has finished reading. Segments of ended prompts are ignored."""
        for number in numbers:
            if (prompt := self._lent.pop(number, None)) is not None:
                self._num_pieces[prompt] -= 1

    def forget(self, prompt: Prompt) -> None:
        """Sends no more of this prompt, and forgets its lent segments.

        A receiver that still reads them notices when the slots are reused: their stamps (numbers that are new for each
        row that gets a slot) are then newer than the one in its ticket.
        """
        super().forget(prompt)
        self._lent = {number: borrower for number, borrower in self._lent.items() if borrower is not prompt}

    def _take(self, pieces: Sequence[Piece]) -> None:
        self._queued.extend(pieces)

    def _written(self) -> list[Piece]:
        """Takes the written pieces out of the queue and returns those to lend.

        Adjacent layers of the same tokens are joined into one piece.
        """
        pieces: list[Piece] = []
        last: dict[tuple[int, str, int], int] = {}
        while self._queued and self._queued[0].written.is_done():
            piece = self._queued.popleft()
            raise_if_device_failed(piece.written)
            if not self._is_wanted(piece):
                continue
            tokens = (id(piece.prompt), piece.group.name, piece.token_start)
            place = last.get(tokens)
            if place is not None and _are_one_loan(pieces[place], piece):
                pieces[place].num_layers += piece.num_layers
                self._num_pieces[piece.prompt] -= 1
            else:
                last[tokens] = len(pieces)
                pieces.append(piece)
        return pieces


def _are_one_loan(first: Piece, following: Piece) -> bool:
    """Returns whether two pieces of a row, whose first token is the same, can be lent as one segment.

    They must have the same tokens and adjacent layers, and together must not exceed MAX_LENT_BYTES.
    """
    return (
        following.num_tokens == first.num_tokens
        and following.layer_start == first.layers.stop
        and first.num_bytes + following.num_bytes <= MAX_LENT_BYTES
    )
