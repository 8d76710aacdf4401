"""Scenarios of a prefill engine: a few prompts in chunks, the copies of their KV to the host, and cancellations at any
time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import numpy as np

from common.sampling.params import ResolvedSampling
from common.sampling.state import SamplingState
from common.wire.handoff import KvSegment, PrebuiltBatch, RowFailed
from prefill_service.messages import BytesSent, CallDone, CancelCallRows, Command, Event, FrameReady, OpenCall
from tests.engine.harness import assert_conserved
from tests.engine.tags import CONTEXT_TOKENS, GROUP, WINDOW, TagModel, kv_of, oracle
from tests.interleavings.explored_device import ExploredDevice
from tests.interleavings.scenarios import EVICTED, INBOX, REUSED, SALT, building, shared_by
from tests.support.engines import Received, handoff_rows, new_prefill_engine

Body = Callable[["ExploredPrefill"], None]
_MAX_STEPS = 400


@dataclass(slots=True)
class _Row:
    token_ids: tuple[int, ...]
    first_wanted: dict[str, int]
    """The first token of each layer group that is to be sent."""
    sent: list[tuple[str, int, int]] = field(default_factory=list)  # (layer group, layer, token)
    first_token: int | None = None
    is_cancelled: bool = False

    @property
    def is_complete(self) -> bool:
        wanted = [
            (group, layer, token)
            for group, first in self.first_wanted.items()
            for layer, token in product(range(GROUP.num_layers), range(first, len(self.token_ids)))
        ]
        return self.first_token is not None and sorted(self.sent) == sorted(wanted)


class ExploredPrefill:
    """A prefill engine with one call. The streams "wire" and "client", which the explorer schedules, send its frames
    and cancel its rows.
    """

    def __init__(
        self, device: ExploredDevice, *, max_rows: int, max_kv_tokens: int, max_window_tokens: int, budget_tokens: int
    ) -> None:
        self._received: Received[Event] = Received()
        self.engine = new_prefill_engine(
            TagModel((WINDOW,) if max_window_tokens else ()),
            device,
            outbox=self._received,
            max_rows=max_rows,
            max_kv_tokens=max_kv_tokens,
            max_window_tokens=max_window_tokens,
            max_context_tokens=CONTEXT_TOKENS,
            chunk_tokens=2,
            max_batch_tokens=4,
            send_budget_bytes=budget_tokens * GROUP.token_bytes,
            max_segment_bytes=2 * GROUP.token_bytes,
            clock=lambda: 0.0,
            debug_checks=False,
        )
        self._device = device
        self._wire = device.new_outside_stream("wire")
        self._client = device.new_outside_stream("client")
        self._posted: list[Command] = []
        self._sampling = ResolvedSampling(seed=0, max_tokens=4, temperature=0.0)
        self.rows: list[_Row] = []
        self._is_done = False

    def open(self, *prompts: tuple[int, ...], cache_salt: str | None = None, num_held: int = 0) -> None:
        """Opens the call with a row for each prompt. The decode service holds the first `num_held` tokens of each."""
        pool = self.engine.pool
        self.rows = [
            _Row(prompt, {name: max(num_held, pool.first_kept(name, len(prompt))) for name in pool.groups})
            for prompt in prompts
        ]
        held = tuple((name, num_held) for name in pool.groups)
        rows = [
            replace(row, cache_salt=cache_salt, num_held_tokens=held) for row in handoff_rows(prompts, self._sampling)
        ]
        self._posted.append(OpenCall("call", tuple(rows)))

    def cancel_some_time(self, row: int) -> None:
        self._client.enqueue(partial(self._deliver, CancelCallRows("call", (row,))))

    def live(self) -> None:
        """Steps until every row has ended and all rows, slots and bytes are free again."""
        for _ in range(_MAX_STEPS):
            self._step()
            load = self.engine.load()
            all_free = load.rows.free == load.rows.total and not load.slots.held
            if self._is_done and all_free and not load.unsent_bytes:
                self.engine.pool.check_conservation()
                return
            if self.engine.idle_timeout_s() > 0:
                self._device.idle()
        raise AssertionError(f"not over after {_MAX_STEPS} steps: {self.engine.load()}")

    def _step(self) -> None:
        self._device.point()
        self._device.current.footprint.reads.add(INBOX)
        commands, self._posted = self._posted, []
        for command in commands:
            if isinstance(command, CancelCallRows) and not self._is_done:
                self.rows[command.rows[0]].is_cancelled = True
        self.engine.step(commands)
        for event in self._received.take():
            self._note(event)
        assert_conserved(self.engine.load())

    def _deliver(self, command: Command) -> None:
        self._posted.append(command)
        self._device.current.footprint.writes.add(INBOX)

    def _note(self, event: Event) -> None:
        assert not self._is_done, f"the call is done, and then came {event}"
        match event:
            case FrameReady(_, KvSegment() as segment):
                self._take_segment(segment)
            case FrameReady(_, PrebuiltBatch() as columns):
                for index, token in zip(columns.rows.tolist(), columns.first_token_ids.tolist(), strict=True):
                    row = self.rows[index]
                    assert not row.is_cancelled, f"a first token of row {index}, which was cancelled"
                    assert row.first_token is None, f"two first tokens of row {index}"
                    (row.first_token,) = (token,)
                    assert [token] == oracle(row.token_ids, 1, self._sampling), f"first token {token} is wrong"
            case FrameReady(_, RowFailed() as failed):
                assert self.rows[failed.row].is_cancelled, f"a row failed: {failed}"
            case CallDone():
                self._is_done = True
                assert all(row.is_complete or row.is_cancelled for row in self.rows), "done before all was sent"

    def _take_segment(self, segment: KvSegment) -> None:
        self._wire.enqueue(partial(self._deliver, BytesSent("call", segment.num_bytes)))
        row = self.rows[segment.row]
        assert not row.is_cancelled, f"a segment of row {segment.row}, which was cancelled"
        layers = range(segment.layer_start, segment.layer_start + segment.num_layers)
        tokens = range(segment.token_start, segment.token_start + segment.num_tokens)
        right = kv_of(row.token_ids)[layers.start : layers.stop, :, tokens.start : tokens.stop]
        sent = np.frombuffer(segment.payload, np.float32).reshape(right.shape)
        assert np.array_equal(sent, right), f"wrong KV was sent of row {segment.row}, {tokens}"
        row.sent += product([segment.layer_group], layers, tokens)


@dataclass(frozen=True, slots=True)
class PrefillScenario:
    """A scenario of a prefill engine of the given size. `budget_tokens` limits the tokens whose KV may be unsent at
    any time. With `max_window_tokens` the model has layers with a window, and that many slots for them.
    """

    body: Body
    max_rows: int
    max_kv_tokens: int
    budget_tokens: int = 64
    lags: bool = False
    at_once: bool = False
    max_window_tokens: int = 0

    @property
    def name(self) -> str:
        lagging = "-lagging" if self.lags else ""
        at_once = "-at_once" if self.at_once else ""
        window = f"-{self.max_window_tokens}_window_slots" if self.max_window_tokens else ""
        return (
            f"prefill-{self.body.__name__}-{self.max_rows}_rows-{self.budget_tokens}_budget{lagging}{at_once}{window}"
        )

    def program(self, device: ExploredDevice) -> None:
        """Runs the scenario on the device, as a Program (explorer.py)."""
        if self.lags:
            device.lag_schedule_side()
        if self.at_once:
            device.run_pieces_at_once()
        with building(SamplingState) as built:
            prefill = ExploredPrefill(
                device,
                max_rows=self.max_rows,
                max_kv_tokens=self.max_kv_tokens,
                max_window_tokens=self.max_window_tokens,
                budget_tokens=self.budget_tokens,
            )
        with device.exploring(shared_by(prefill.engine.pool, *built)):
            self.body(prefill)
            prefill.live()
        device.check_no_races()
        prefixes = prefill.engine.load().prefixes
        if prefixes.num_found:
            device.witnessed.add(REUSED)
        if prefixes.num_evicted:
            device.witnessed.add(EVICTED)


def one_prompt(prefill: ExploredPrefill) -> None:
    """A prompt has two chunks. The first chunk's KV leaves while the second is computed."""
    prefill.open((1, 2, 3))


def two_prompts(prefill: ExploredPrefill) -> None:
    """Two prompts are computed together, or one after the other if rows are short."""
    prefill.open((1, 2, 3), (5, 6))


def one_cancelled(prefill: ExploredPrefill) -> None:
    """One of two prompts is cancelled at any time: while queued, computed or sent. The other takes its row or its
    slots.
    """
    prefill.open((1, 2, 3), (5, 6, 7))
    prefill.cancel_some_time(0)


def reused(prefill: ExploredPrefill) -> None:
    """Prompts that begin alike wait for each other's KV, and for slots in which earlier prompts left theirs. The decode
    service holds one token of each.
    """
    prefill.open((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 9), (7, 8, 9), cache_salt=SALT, num_held=1)


def reused_beside_a_cancellation(prefill: ExploredPrefill) -> None:
    """The prompt whose KV the others use, or wait for, is cancelled at any time: while queued, computed or sent."""
    prefill.open((1, 2, 3, 4), (1, 2, 3, 4, 5), (1, 2, 9), cache_salt=SALT)
    prefill.cancel_some_time(0)


def kept_beside_a_cancellation(prefill: ExploredPrefill) -> None:
    """A prompt is cancelled at any time, perhaps while KV that it left in the cache is still copied out of the pool.
    The other prompt needs those slots.
    """
    prefill.open((1, 2, 3, 4), (7, 8, 9, 5), cache_salt=SALT)
    prefill.cancel_some_time(0)


def windows_beside_a_cancellation(prefill: ExploredPrefill) -> None:
    """Tokens of prompts leave their windows between chunks. A prompt is cancelled at any time, perhaps while the KV of
    its window is copied out of the pool. The other prompt needs those slots.
    """
    prefill.open((1, 2, 3, 4, 5, 6, 7), (7, 8, 9, 5, 6, 4), cache_salt=SALT)
    prefill.cancel_some_time(0)
