"""The engine's data about running requests, as columns indexed by pool row, so that a step handles all rows at once.

Request ──enter──▶ columns, step after step ──leave──▶ Request: tokens and counts added up
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from common.sampling.params import MAX_END_TOKEN_IDS
from common.sampling.state import RowStart
from common.telemetry.stats import SpeculationCounts, SpeculationStats
from decode_service.schedule.request import Request
from decode_service.speculate.spec_info import SpecInfo

Rows = NDArray[np.int64]
_NO_TOKEN = -1
_PARTS = ("draft_s", "verify_s", "extend_s")
_NUM_TOTALS = 4 + len(_PARTS)  # verify steps, drafted, accepted and forced tokens, seconds


class RunningRows:
    """The state of running requests (phases BOOTSTRAP to RETRACTING), as columns indexed by pool row.

    Only the engine thread calls it, and only `Lives` calls `enter` and `leave`. `serials` [rows] holds a number that is
    new for each stay of a request in a row, or 0 if the row is empty. `num_in_flight` [rows] counts launched steps
    whose results are not taken yet; each adds at least one token, unless it fails. `num_unread` [rows] counts the
    tokens that the drafter had not read after the last step whose results were taken. `drafts` has the figures of
    drafting since a request entered its row; `leave` adds them to the request's `speculation`. A step drafts
    at most `max_depth` levels.
    """

    def __init__(self, *, max_rows: int, max_context_tokens: int, max_depth: int) -> None:
        rows = max_rows + 1

        def column(*shape: int) -> Rows:
            return np.zeros((rows, *shape), dtype=np.int64)

        self.serials = column()
        self.num_in_flight = column()
        self.num_unread = column()
        self._next_serials = itertools.count(1)
        self._limits = column()  # the most tokens each request may have, prompt and output
        self._num_left = column()  # tokens left until that limit; 0 where the row is empty
        self._end_ids = column(MAX_END_TOKEN_IDS)
        self._num_end_ids = column()
        self._most_end_ids = 0  # the largest count of end ids in any occupied row
        self._num_new = column()  # output tokens since the request entered the row
        self._new_ids = np.empty((rows, max_context_tokens + max_depth), dtype=np.int32)
        self._has_decoded = np.zeros(rows, dtype=np.bool_)
        self.drafts = DraftTallies(rows, max_depth=max_depth)

    def enter(self, req: Request) -> None:
        assert req.lease is not None
        row, end_ids = req.lease.row, req.sampling.end_token_ids
        self.serials[row] = next(self._next_serials)
        self.num_in_flight[row] = self.num_unread[row] = 0
        self._limits[row] = req.prompt_len + req.sampling.max_tokens
        self._num_left[row] = self._limits[row] - len(req.token_ids)
        self._end_ids[row] = _NO_TOKEN
        self._end_ids[row, : len(end_ids)] = end_ids
        self._set_num_end_ids(row, len(end_ids))
        self._num_new[row] = 0
        self._has_decoded[row] = req.has_decoded
        req.running_in = self
        self.drafts.clear(row)

    def leave(self, req: Request) -> None:
        """Removes the request from its row. Results of a step in flight no longer reach it."""
        assert req.lease is not None
        row = req.lease.row
        self.serials[row] = self._num_left[row] = 0
        self._set_num_end_ids(row, 0)
        req.leave_row()
        req.speculation += self.drafts.counts(row)

    def row_start(self, req: Request) -> RowStart:
        """Returns what sampling must know when the request enters its row: the request's parameters and its tokens so
        far.
        """
        assert req.lease is not None
        return RowStart(req.lease.row, req.sampling, req.choice_index, tuple(req.token_ids), req.prompt_len)

    def want_launch(self, rows: Rows) -> NDArray[np.bool_]:
        """Returns, for each of `rows` [B], whether the request still needs a token after those of the steps in flight.

        It assumes that each step in flight adds one token, and compares with the request's limit.
        """
        wanted: NDArray[np.bool_] = self.num_in_flight[rows] < self._num_left[rows]
        return wanted

    def have_room_after(self, rows: Rows, seq_lens: Rows) -> NDArray[np.bool_]:
        """Returns, for each of `rows` [B], whether the request is still below its limit at the length `seq_lens` [B].

        `seq_lens` are the numbers of tokens with committed KV, those of the steps in flight included. The request has
        one token more, whose KV is not computed yet.
        """
        has_room: NDArray[np.bool_] = seq_lens + 1 < self._limits[rows]
        return has_room

    def can_have(self, rows: Rows, seq_lens: Rows, *, max_accept_len: int) -> NDArray[np.bool_]:
        """Returns, for each of `rows` [B], whether `seq_lens` [B] is a possible number of tokens with committed KV.

        The smallest possible number is that of the request's tokens less one, because the last token has no KV yet.
        Each step in flight adds at most `max_accept_len` tokens, and none if it failed.
        """
        num_before = self._limits[rows] - self._num_left[rows] - 1
        most = num_before + self.num_in_flight[rows] * max_accept_len
        can_be: NDArray[np.bool_] = (num_before <= seq_lens) & (seq_lens <= most)
        return can_be

    def append(self, rows: Rows, token_ids: Rows, num_offered: Rows) -> tuple[Rows, NDArray[np.bool_]]:
        """Appends new output tokens to the requests in `rows` [B], which are distinct.

        Request b gets the first `num_offered[b]` tokens of `token_ids[b]` [B, W], but none after a token that ends it.
        Returns how many tokens each request gained and whether it ended, both [B].
        """
        num_left, num_new = self._num_left[rows], self._num_new[rows]
        num_until_end = num_left
        are_end_ids = token_ids[:, :, None] == self._end_ids[rows, None, : self._most_end_ids]
        if np.count_nonzero(are_end_ids):  # only few steps contain an end token
            is_end = are_end_ids.any(axis=2)
            num_until_end = np.minimum(num_left, np.where(is_end.any(axis=1), is_end.argmax(axis=1) + 1, num_left))
        has_ended = num_until_end <= num_offered
        num_added = np.minimum(num_until_end, num_offered)
        places = num_new[:, None] + np.arange(token_ids.shape[1])
        self._new_ids[rows[:, None], places] = token_ids  # tokens that do not count are overwritten, or never read
        self._num_new[rows] = num_new + num_added
        self._num_left[rows] = num_left - num_added
        return num_added, has_ended

    def ends_with(self, row: int, token_ids: Rows) -> bool:
        """Returns whether the request in pool row `row` ends with one of `token_ids` [N], its next tokens."""
        is_end = np.isin(token_ids, self._end_ids[row, : self._num_end_ids[row]]).any()
        return bool(is_end or len(token_ids) >= self._num_left[row])

    def decode(self, rows: Rows) -> Rows:
        """Notes that a decode step of the requests in `rows` [B] has ended.

        Returns the indices into `rows` of the requests for which it was the first, in this row or an earlier one.
        """
        (are_first,) = (~self._has_decoded[rows]).nonzero()
        self._has_decoded[rows] = True
        return are_first

    def _set_num_end_ids(self, row: int, num_end_ids: int) -> None:
        self._num_end_ids[row] = num_end_ids
        self._most_end_ids = int(self._num_end_ids.max())

    def new_tokens(self, row: int) -> list[int]:
        """Returns the output tokens that the request in pool row `row` has gained since it entered that row."""
        tokens: list[int] = self._new_ids[row, : self._num_new[row]].tolist()
        return tokens


class DraftTallies:
    """The drafting and verification figures of all running requests since they entered their rows, in one table.

    A step adds the figures of all its rows at once. A step drafts at most `max_depth` levels.
    """

    def __init__(self, num_rows: int, *, max_depth: int) -> None:
        self._max_depth = max_depth
        self._table = np.zeros((num_rows, _NUM_TOTALS + 2 * max_depth))  # float64 holds such counts exactly

    def clear(self, row: int) -> None:
        self._table[row] = 0

    def add(
        self,
        rows: NDArray[np.int64],
        spec_info: SpecInfo,
        *,
        num_accepted: NDArray[np.int64],
        num_forced: NDArray[np.int64],
        stats: SpeculationStats,
    ) -> None:
        """Adds the figures of one step to `rows` [B], which are distinct and want drafts.

        `num_accepted` [B] is how many drafts of each row were accepted, and `num_forced` [B] how many its grammar
        forced. The figures by level count only rows without forced drafts: others do not show how well the head
        guesses.
        """
        num_levels, accepted_at = spec_info.num_steps, _NUM_TOTALS + self._max_depth
        step = np.zeros((len(rows), self._table.shape[1]))
        step[:, :_NUM_TOTALS] = (1, spec_info.num_draft_tokens, 0, 0, *(getattr(stats, part) for part in _PARTS))
        step[:, 2] = num_accepted
        step[:, 3] = np.minimum(num_accepted, num_forced)
        is_free = (num_forced == 0)[:, None]
        step[:, _NUM_TOTALS : _NUM_TOTALS + num_levels] = is_free
        step[:, accepted_at : accepted_at + num_levels] = is_free & (np.arange(num_levels) < num_accepted[:, None])
        self._table[rows] += step

    def counts(self, row: int) -> SpeculationCounts:
        """Returns the figures of pool row `row`, by level down to the deepest one that it drafted."""
        num_verify_steps, num_drafted, num_accepted, num_forced, *parts_s = self._table[row, :_NUM_TOTALS].tolist()
        levels = self._table[row, _NUM_TOTALS:].astype(np.int64).reshape(2, self._max_depth)
        drafted_at, accepted_at = levels[:, levels[0] > 0].tolist()
        return SpeculationCounts(
            num_verify_steps=int(num_verify_steps),
            num_drafted_tokens=int(num_drafted),
            num_accepted_tokens=int(num_accepted),
            num_forced_tokens=int(num_forced),
            drafted_at=tuple(drafted_at),
            accepted_at=tuple(accepted_at),
            **dict(zip(_PARTS, parts_s, strict=True)),
        )
