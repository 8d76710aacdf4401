"""KV that stays where it was written: receivers get tickets into the pool's memory, and read there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

from common.device.stream import raise_if_device_failed
from common.kv.shared_kv import MAX_LENT_BYTES
from common.kv.shared_pool import SharedPool
from prefill_service.handoff.piece import Piece, PieceSender, SentPiece
from prefill_service.prompt import Prompt


class LendingSender(PieceSender):
    """A piece needs the pool until its receiver gave it back: its prompt does not end before, and keeps its slots."""

    def __init__(self, memory: SharedPool) -> None:
        super().__init__(max_segment_bytes=MAX_LENT_BYTES)
        self._memory = memory
        self._queued: deque[Piece] = deque()
        self._lent: dict[int, Prompt] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._queued)

    def poll(self) -> Iterator[SentPiece]:
        for piece in self._written():
            shared = self._memory.lend(piece.group.name, piece.layers, piece.slots, piece.lease.generation)
            self._lent[shared.ticket.number] = piece.prompt
            yield SentPiece(piece.prompt, replace(piece.segment, shared=shared), None)

    def return_segments(self, numbers: Sequence[int]) -> None:
        """The receiver reads these segments no more. Segments of ended prompts are ignored."""
        for number in numbers:
            if (prompt := self._lent.pop(number, None)) is not None:
                self._num_pieces[prompt] -= 1

    def forget(self, prompt: Prompt) -> None:
        """Send no more of this prompt, and take back what is lent: its stamps tell those who still read."""
        super().forget(prompt)
        self._lent = {number: borrower for number, borrower in self._lent.items() if borrower is not prompt}

    def _take(self, pieces: Sequence[Piece]) -> None:
        self._queued.extend(pieces)

    def _written(self) -> list[Piece]:
        """Lendable pieces, with the layers of the same tokens joined."""
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
    """Whether the second, of the same tokens, is their next layers, and both are few enough for one loan."""
    return (
        following.num_tokens == first.num_tokens
        and following.layer_start == first.layers.stop
        and first.num_bytes + following.num_bytes <= MAX_LENT_BYTES
    )
