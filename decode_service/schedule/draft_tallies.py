"""What drafts came to, row by row, since it was last told: one table, to which a step adds all its rows at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.telemetry.step_stats import SpeculationStats
from decode_service.schedule.request import SpeculationTally
from decode_service.speculate.spec_info import SpecInfo

_PARTS = ("draft_s", "verify_s", "extend_s")
_NUM_TOTALS = 2 + len(_PARTS)  # verify steps, drafted tokens, seconds


class DraftTallies:
    """Of `num_rows` pool rows; `max_depth`: levels that are ever drafted."""

    def __init__(self, num_rows: int, *, max_depth: int) -> None:
        self._max_depth = max_depth
        self._table = np.zeros((num_rows, _NUM_TOTALS + 2 * max_depth))  # counts stay far below what a float64 counts

    def clear(self, row: int) -> None:
        self._table[row] = 0

    def add(
        self, rows: NDArray[np.int64], spec_info: SpecInfo, *, num_accepted: NDArray[np.int64], stats: SpeculationStats
    ) -> None:
        """A step drafted for `rows` [B], distinct, of which `num_accepted` [B] drafts each were accepted."""
        num_levels, accepted_at = spec_info.num_steps, _NUM_TOTALS + self._max_depth
        step = np.zeros((len(rows), self._table.shape[1]))
        step[:, :_NUM_TOTALS] = (1, spec_info.num_draft_tokens, *(getattr(stats, part) for part in _PARTS))
        step[:, _NUM_TOTALS : _NUM_TOTALS + num_levels] = 1
        step[:, accepted_at : accepted_at + num_levels] = np.arange(num_levels) < num_accepted[:, None]
        self._table[rows] += step

    def tell(self, row: int, tally: SpeculationTally) -> None:
        """Add the row's to `tally`."""
        num_verify_steps, num_drafted, *parts_s = self._table[row, :_NUM_TOTALS].tolist()
        levels = self._table[row, _NUM_TOTALS:].astype(np.int64).reshape(2, self._max_depth)
        tally.add(
            num_verify_steps=int(num_verify_steps),
            num_drafted_tokens=int(num_drafted),
            drafted_at=levels[0].tolist(),
            accepted_at=levels[1].tolist(),
            parts_s=dict(zip(_PARTS, parts_s, strict=True)),
        )
