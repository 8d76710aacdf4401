"""Small scenarios of a decode engine whose orders are explored, with the real scheduler, batch, relay and pool.

The model and the draft head are made of tags (tests/engine/tags.py): each token is a hash of everything it depends on.
So any value read too early, too late or from another request shows as a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, partialmethod
from typing import Any
from unittest import mock

from torch import Tensor

from common.errors import PrefillUnavailable
from common.kv.pool import KvPool
from common.sampling.params import ResolvedSampling
from common.sampling.state import SamplingState
from decode_service.forward.eagle_drafter import DraftBacklog
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.forward.future_map import FutureMap
from decode_service.forward.worker import Worker, WorkerOutput
from decode_service.messages import (
    Abort,
    CallEnded,
    Command,
    Event,
    Failed,
    FinishAtStop,
    Finished,
    FinishReason,
    Replica,
    ReplicasChanged,
    StartHandoff,
    Tokens,
)
from decode_service.schedule.config import DecodeConfig
from decode_service.speculate.spec_info import SpecInfo
from tests.engine.harness import REPLICA, ScriptedEngine
from tests.engine.relay_rig import make_batch, make_relay
from tests.engine.speculating import CHAIN, TREE, ScriptedDepth, assert_drafted_as_expected
from tests.engine.tag_head import DRAFT
from tests.engine.tags import TAG_GRAMMAR, WINDOW, oracle
from tests.interleavings.explored_device import ExploredDevice
from tests.interleavings.footprint import Shared
from tests.support.scripted_device import ScriptedDevice

Body = Callable[["ExploredEngine"], None]
READY, NOT_READY = (ReplicasChanged((Replica(REPLICA, is_ready),)) for is_ready in (True, False))
INBOX = "inbox"
SALT = "salt"
FALLBACK_CHUNK_TOKENS = 4
_EARLY = (FinishReason.STOP_STRING, FinishReason.STOP_TOKEN)

LAUNCHED_BEFORE_DRAFT_EXTEND = "a request's next step was launched while its draft-extend had not run"
BOOTSTRAPPED_BEFORE_DRAFT_EXTEND = "a row was bootstrapped and launched beside another whose draft-extend had not run"
RETRIED = "a handoff was tried again"
RETRACTED = "a request was retracted"
REUSED = "a request held KV of another one"
EVICTED = "cached KV gave way"
COMPUTED_HERE = "a prompt was computed in the decode service"
LAUNCHED_BESIDE_A_CHUNK = "a step was launched while a chunk of a prompt had not run"
RESOLVED_BEFORE_DRAFT_EXTEND = "lengths were resolved behind a bootstrap while the draft-extend had not run"


class ExploredEngine(ScriptedEngine):
    """A decode engine on an explored device. Handoffs and aborts are pieces of the streams "wire" and "client", so the
    explorer decides when they arrive.

    With `frames_come_apart` a handoff arrives frame by frame, otherwise as a whole.
    """

    def __init__(
        self, device: ExploredDevice, *, max_rows: int, max_kv_tokens: int, frames_come_apart: bool, **options: Any
    ) -> None:
        # Debug checks read the whole table at each step, which would order everything.
        super().__init__(device=device, max_rows=max_rows, max_kv_tokens=max_kv_tokens, debug_checks=False, **options)
        self._explored = device
        self._wire = device.new_outside_stream("wire")
        self._client = device.new_outside_stream("client")
        self._frames_come_apart = frames_come_apart
        self._to_lose: set[str] = set()
        self._to_abort: dict[str, tuple[str, int]] = {}
        self._to_follow: dict[str, list[Callable[[], None]]] = {}
        self._num_to_come = 0
        self._launched_rows: set[int] = set()

    def hand_over(self, request_id: str, *, last: str = DRAFT.name) -> None:
        call_id, before = self.handoffs[request_id].call_id, len(self._posted)
        with self._explored.unwatched():
            super().hand_over(request_id, last=last)
        commands = self.hold_back(len(self._posted) - before)
        if request_id in self._to_lose:
            self._to_lose.remove(request_id)
            commands[1:] = [CallEnded(call_id, PrefillUnavailable("the replica is gone"))]
        for part in [[command] for command in commands] if self._frames_come_apart else [commands]:
            self._wire.enqueue(partial(self._deliver, *part))

    def abort_some_time(self, request_id: str, *, after_tokens: int = 0, of: str = "") -> None:
        """Aborts the request at any time after its client, or that of the request `of`, has received `after_tokens`
        tokens. A handoff delivered after that comes too late for the engine.
        """
        if len(self.outcomes[of or request_id].token_ids) < after_tokens:
            self._to_abort[request_id] = of or request_id, after_tokens
            return
        self._to_abort.pop(request_id, None)

        def abort() -> None:
            self.outcomes[request_id].is_abandoned = True
            self._deliver(Abort(request_id))
            self._let_follow(request_id)

        self._client.enqueue(abort)

    def follow(self, request_id: str, then: Callable[[], None]) -> None:
        """Calls `then`, which submits another request, some time after this one has ended or was aborted."""
        self._to_follow.setdefault(request_id, []).append(then)
        self._num_to_come += 1

    def _let_follow(self, request_id: str) -> None:
        for then in self._to_follow.pop(request_id, ()):

            def come(then: Callable[[], None] = then) -> None:
                then()
                self._num_to_come -= 1
                self._deliver()

            self._client.enqueue(come)

    def lose_replica_some_time(self, *, returns: bool) -> None:
        """Lets the replica leave at any time, and with it all calls that it has received. If it `returns`, it is ready
        again some time later.
        """
        replica = self._explored.new_outside_stream("replica")

        def lose() -> None:
            self._deliver(
                NOT_READY, *(CallEnded(call_id, PrefillUnavailable("the replica left")) for call_id in self._open_rows)
            )

        replica.enqueue(lose)
        if returns:
            replica.enqueue(partial(self._deliver, READY))

    def watching_launches(self) -> AbstractContextManager[object]:
        """Notes within the block what each step is launched beside."""
        launch = Worker.forward

        def noted(worker: Worker, batch: ForwardBatch, **rest: Any) -> WorkerOutput:
            with self._explored.unwatched():
                self._note_launch(set(batch.req_pool_indices.tolist()), self.forward.pending())
            return launch(worker, batch, **rest)

        return mock.patch.object(Worker, "forward", noted)

    def _note_launch(self, rows: set[int], pending: Sequence[str]) -> None:
        if "read" in pending and rows & self._launched_rows:
            self._explored.witnessed.add(LAUNCHED_BEFORE_DRAFT_EXTEND)
            if rows - self._launched_rows:
                self._explored.witnessed.add(BOOTSTRAPPED_BEFORE_DRAFT_EXTEND)
        if "forward" in pending:
            self._explored.witnessed.add(LAUNCHED_BESIDE_A_CHUNK)
        self._launched_rows = rows

    def lose_handoff_once(self, request_id: str) -> None:
        """Lets the request's first handoff call break after its first segment."""
        self._to_lose.add(request_id)

    def stop_some_time(self, request_id: str) -> None:
        """Lets the edge report, at any time, a stop string in the request's first token."""
        self._client.enqueue(partial(self._deliver, FinishAtStop(request_id, 1, "stop")))

    def step(self) -> list[Event]:
        self._explored.point()
        self._look_into_the_inbox()
        return super().step()

    def live(self) -> None:
        """Steps, and delivers every handoff the engine asks for, until every request has ended and all rows and slots
        are free.
        """
        self.run(advance=self._rest)

    def _note(self, event: Event) -> None:
        match event:
            case Tokens(request_ids):
                self._check_live(event, request_ids)
            case Finished(request_id) | Failed(request_id):
                self._check_live(event, [request_id])
                self._let_follow(request_id)
            case StartHandoff(_, _, rows):
                for row in rows:
                    held = max(num_tokens for _, num_tokens in row.num_held_tokens)
                    self._check_namespace(row.request_id, row.token_ids, held)
        if isinstance(event, Finished) and not event.timings.num_handoff_attempts:
            self._explored.witnessed.add(COMPUTED_HERE)
            prompt = self.outcomes[event.request_id].prompt
            self._check_namespace(event.request_id, prompt, event.timings.num_cached_tokens)
        super()._note(event)

    def _check_namespace(self, request_id: str, token_ids: Sequence[int], num_held: int) -> None:
        """Checks that a request holds only KV of tokens that requests of its own namespace have too."""
        own = self.outcomes[request_id]
        if not num_held:
            return
        with self._explored.unwatched():
            left_by = [
                (*other.prompt, *other.expected)
                for name, other in self.outcomes.items()
                if own.cache_salt is not None and other.cache_salt == own.cache_salt and name != request_id
            ]
        req = self.engine.lives.requests.get(request_id)
        if own.cache_salt is not None and req is not None and (req.num_retractions or req.num_failures):
            left_by.append(tuple(token_ids))
        held = tuple(token_ids[:num_held])
        assert any(text[:num_held] == held for text in left_by), f"{request_id} holds KV of another namespace: {held}"

    def _note_tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        super()._note_tokens(request_id, token_ids)
        for aborted, (of, after_tokens) in list(self._to_abort.items()):
            if of == request_id:
                self.abort_some_time(aborted, after_tokens=after_tokens, of=of)

    def _check_live(self, event: Event, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            outcome = self.outcomes[request_id]
            has_ended = outcome.finished is not None or outcome.error is not None
            assert not has_ended, f"{request_id} has ended, and then came {event}"

    def _is_over(self) -> bool:
        self._look_into_the_inbox()
        return super()._is_over() and not self._num_to_come

    def _look_into_the_inbox(self) -> None:
        self._explored.current.footprint.reads.add(INBOX)

    def _deliver(self, *commands: Command) -> None:
        for command in commands:
            self.post(command)
        self._explored.current.footprint.writes.add(INBOX)

    def _rest(self, device: ScriptedDevice) -> None:
        if self.engine.idle_timeout_s() > 0:
            self._explored.idle()


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario: `body` submits requests to an engine of the given size, and the engine's whole life is explored.

    Its steps draft the `depths` in turn, or always `spec_info`. With `lags` the schedule side runs later than the host,
    as on a GPU. With `at_once` all streams do, and a piece's Python code runs when it is enqueued (launch_order.py).
    `headroom_tokens` is the number of slots that admission leaves free for each row; with few of them, requests soon
    have to be retracted. A prompt with at most `local_prefill_tokens` left to compute is computed in the decode
    service. With `prefill_fallback` the decode service computes all prompts while no replica is ready, in chunks of at
    most FALLBACK_CHUNK_TOKENS tokens. With `max_window_tokens` the model has layers with a window, and that many slots
    for them. Tokens then leave a window one by one.
    """

    body: Body
    max_rows: int
    max_kv_tokens: int
    spec_info: SpecInfo | None = None
    depths: tuple[SpecInfo, ...] = ()
    overlap: bool = True
    lags: bool = False
    at_once: bool = False
    frames_come_apart: bool = False
    headroom_tokens: int = DecodeConfig().headroom_tokens
    local_prefill_tokens: int = 0
    prefill_fallback: bool = False
    max_window_tokens: int = 0
    replicas: ReplicasChanged = READY

    @property
    def name(self) -> str:
        speculation = {None: "plain", CHAIN: "chain", TREE: "tree"}[self.spec_info]
        parts = {
            self.body.__name__: True,
            speculation: True,
            f"{len(self.depths)}_depths": len(self.depths) > 0,
            f"{self.max_rows}_rows": True,
            "no_overlap": not self.overlap,
            "lagging": self.lags,
            "at_once": self.at_once,
            "frames": self.frames_come_apart,
            f"{self.local_prefill_tokens}_local": self.local_prefill_tokens > 0,
            "fallback": self.prefill_fallback,
            f"{self.max_window_tokens}_window_slots": self.max_window_tokens > 0,
        }
        return "-".join(part for part, is_there in parts.items() if is_there)

    def program(self, device: ExploredDevice) -> None:
        """Runs the scenario on the device, as a Program (explorer.py)."""
        if self.lags:
            device.lag_schedule_side()
        if self.at_once:
            device.run_pieces_at_once()
        with building(SamplingState, DraftBacklog) as built:
            engine = ExploredEngine(
                device,
                max_rows=self.max_rows,
                max_kv_tokens=self.max_kv_tokens,
                spec_info=self.spec_info,
                depth=ScriptedDepth(self.depths, deepest=self.spec_info) if self.spec_info and self.depths else None,
                overlap=self.overlap,
                frames_come_apart=self.frames_come_apart,
                local_prefill_tokens=self.local_prefill_tokens,
                prefill_fallback=self.prefill_fallback,
                fallback_chunk_tokens=FALLBACK_CHUNK_TOKENS,
                headroom_tokens=self.headroom_tokens,
                left_together=1,
                replicas=self.replicas,
                windows=(WINDOW,) if self.max_window_tokens else (),
                max_window_tokens=self.max_window_tokens,
            )
        shared = shared_by(engine.engine.pool, engine.engine.future_map, *built)
        with device.exploring(shared), engine.watching_launches():
            self.body(engine)
            engine.live()
        device.check_no_races()
        load = engine.engine.load()
        if load.num_row_retries:
            device.witnessed.add(RETRIED)
        if load.num_retractions:
            device.witnessed.add(RETRACTED)
        if load.prefixes.num_found:
            device.witnessed.add(REUSED)
        if load.prefixes.num_evicted:
            device.witnessed.add(EVICTED)
        drafts_fit = self._drafts_fit(engine)
        for request_id, outcome in engine.outcomes.items():
            is_cut = outcome.is_abandoned or (outcome.finished and outcome.finished.reason in _EARLY)
            wanted = outcome.expected[: len(outcome.token_ids)] if is_cut else outcome.expected
            assert outcome.error is None, f"{request_id} failed: {outcome.error}"
            assert outcome.token_ids == wanted, f"{request_id} was decoded wrongly: {outcome.token_ids}, not {wanted}"
            is_drafted_for = self.spec_info is CHAIN and outcome.sampling.max_tokens > 1
            if is_drafted_for and not is_cut and drafts_fit:
                assert_drafted_as_expected(outcome)

    def _drafts_fit(self, engine: ExploredEngine) -> bool:
        """Returns whether requests that run together always leave enough slots for a step's drafts. Otherwise steps
        draft less, or retract a request.
        """
        if self.spec_info is None:
            return False
        if any(window.num_slots < self.max_rows * window.row_slots for window in engine.engine.pool.windows.values()):
            return False
        needs = sorted(len(each.prompt) + each.sampling.max_tokens for each in engine.outcomes.values())
        return sum(needs[-self.max_rows :]) + self.max_rows * self.spec_info.num_slots <= self.max_kv_tokens


@dataclass(frozen=True, slots=True)
class RelayAlone:
    """A scenario of the relay (FutureMap) without an engine: a new row is written into it while a step of other rows
    verifies and drafts.
    """

    name: str = "bootstrap_beside_draft_extend"

    def program(self, device: ExploredDevice) -> None:
        """Runs the scenario on the device, as a Program (explorer.py)."""
        relay = make_relay(device=device)
        future_map = relay.future_map
        buffers = [future_map.output_tokens, future_map.new_seq_lens_buf]
        with device.exploring(Shared(f"relay {i}", buffer, 0) for i, buffer in enumerate(buffers)):
            relay.launch([1, 2], [7, 8], [10, 20])
            relay.bootstrap([3], [5], [30])
            running = make_batch([1, 2, 3], [5, 5, 5])
            relay.resolve(running)
            if "draft_extend" in relay.forward.pending():
                device.witnessed.add(RESOLVED_BEFORE_DRAFT_EXTEND)
        device.check_no_races()
        assert running.seq_lens_cpu.tolist() == [7, 8, 5], f"lengths were resolved wrongly: {running.seq_lens_cpu}"


@contextmanager
def building(*kinds: type) -> Iterator[list[object]]:
    """Yields a list, to which each object of these kinds is added that is built within the block."""
    built: list[object] = []

    def noting(init: Callable[..., None], it: object, *args: Any, **options: Any) -> None:
        built.append(it)
        init(it, *args, **options)

    with ExitStack() as patches:
        for kind in kinds:
            noted = partialmethod(partial(noting, kind.__init__))  # type: ignore[misc]
            patches.enter_context(mock.patch.object(kind, "__init__", noted))
        yield built


def shared_by(pool: KvPool, *holders: object) -> Iterator[Shared]:
    """Yields the buffers that the engine's thread and its streams both touch. All of them are allocated at start-up."""
    for name, buffer in pool.buffers.items():
        yield Shared(f"kv of {name}", buffer, 2)
    yield Shared("token table", pool.rows.req_to_token, is_written_by_host_alone=True)
    for window in pool.windows.values():
        yield Shared("window's table", window.table, is_written_by_host_alone=True)
        yield Shared("window's slots", window.slot_of, is_written_by_host_alone=True)
    for holder in holders:
        tensors = {name: value for name, value in _attributes(holder).items() if isinstance(value, Tensor)}
        for name, value in tensors.items():
            if not value.dim() or value.shape[0] != pool.rows.max_rows + 1:
                continue
            if value._is_view():  # a column is tracked as part of its table
                assert any(value._base is table for table in tensors.values())
            else:
                yield Shared(f"{type(holder).__name__}.{name}", value, 0)


def _attributes(holder: object) -> dict[str, object]:
    return {**vars(holder), **(holder.seeds if isinstance(holder, FutureMap) else {})}


# ---- bodies of scenarios ----------------------------------------------------------------------------------------


def one_request(engine: ExploredEngine) -> None:
    engine.submit("a", [1, 2, 3], 4)


def two_requests(engine: ExploredEngine) -> None:
    """The KV of each request arrives, and its row joins the batch and finishes while the other's forwards run, or
    after them if rows are short.
    """
    engine.submit("a", [1, 2], 3)
    engine.submit("b", [5, 6, 7], 3)


def four_requests(engine: ExploredEngine) -> None:
    for number in range(4):
        engine.submit(str(number), [number + 1, 7], 3)


def one_aborted(engine: ExploredEngine) -> None:
    """One request is aborted at any time: while queued, landing or in flight. The other takes its row or its slots."""
    engine.submit("a", [1, 2], 3)
    engine.submit("b", [5, 6, 7], 3)
    engine.abort_some_time("a")


def growing_beside_an_abort(engine: ExploredEngine) -> None:
    """One request is aborted at any time, even while its KV is copied in. A running request grows into its slots."""
    engine.submit("a", [1, 2], 5)
    engine.submit("b", [5, 6, 7], 3)
    engine.abort_some_time("b")


def short_of_slots(engine: ExploredEngine) -> None:
    """If both requests run together, the younger gives up its slots while a forward holds them, and returns later."""
    engine.submit("a", [1, 2], 20)
    engine.submit("b", [5, 6], 20)


def soon_short_of_slots(engine: ExploredEngine) -> None:
    """As `short_of_slots`, but within a few steps. No retraction happens if one request ends before the other
    starts.
    """
    engine.submit("a", [1], 4)
    engine.submit("b", [5], 4)


def aborted_when_short_of_slots(engine: ExploredEngine) -> None:
    """The younger request is aborted before its retraction, during it, while it waits again, or after its return."""
    engine.submit("a", [1], 6)
    engine.submit("b", [5], 6)
    engine.abort_some_time("b", after_tokens=3)


def handoff_lost(engine: ExploredEngine) -> None:
    """The second request's handoff breaks while a segment is on its way. It is retried while the first request's
    forwards run.
    """
    engine.submit("a", [1, 2], 4)
    engine.submit("b", [5, 6, 7], 3)
    engine.lose_handoff_once("b")


def one_stopped(engine: ExploredEngine) -> None:
    """A stop string ends one request at any time, even with its forward in flight. The other takes its row and
    slots.
    """
    engine.submit("a", [1, 2], 3)
    engine.submit("b", [5, 6, 7], 3)
    engine.stop_some_time("a")


def one_constrained(engine: ExploredEngine) -> None:
    engine.submit("a", [1, 2, 3], 4, is_constrained=True)


def constrained_beside_a_free_one(engine: ExploredEngine) -> None:
    """A grammar constrains one of two requests, and forces more tokens than a step drafts. Its draws wait for their
    masks, and so do the other request's draws in the same step.
    """
    engine.submit("a", [2, 1], 7, is_constrained=True)
    engine.submit("b", [5, 6, 7], 3)


def constrained_and_aborted(engine: ExploredEngine) -> None:
    """A request with a grammar is aborted at any time, even between the launch of its step and its draws. Another one
    takes its row.
    """
    engine.submit("a", [1, 2], 3, is_constrained=True)
    engine.submit("b", [5, 6, 7], 3, is_constrained=True)
    engine.abort_some_time("a")


def constrained_and_stopped(engine: ExploredEngine) -> None:
    """Two requests with the same prompt and grammar end at a stop token, while their next step is launched but its
    tokens are not drawn. The cache keeps the KV of one of them.
    """
    prompt, greedy = [1, 2], ResolvedSampling(seed=0, max_tokens=6, temperature=0.0, grammar=TAG_GRAMMAR)
    ends = (oracle(prompt, 3, greedy)[-1],)
    engine.submit("a", prompt, 6, stop_token_ids=ends, cache_salt=SALT, is_constrained=True)
    engine.submit("b", prompt, 6, stop_token_ids=ends, cache_salt=SALT, is_constrained=True)


def constrained_when_short(engine: ExploredEngine) -> None:
    """The younger of two requests with grammars is retracted. When it returns, it continues where it was in its
    grammar.
    """
    engine.submit("a", [1], 4, is_constrained=True)
    engine.submit("b", [5], 4, is_constrained=True)


def constrained_in_a_chunk(engine: ExploredEngine) -> None:
    """Prompts of requests with grammars are computed in the decode service beside decode steps. One is aborted at any
    time.
    """
    engine.submit("a", [1, 2], 5, cache_salt=SALT, is_constrained=True)
    engine.submit("b", [1, 2, 7], 3, cache_salt=SALT, is_constrained=True)
    engine.abort_some_time("b", after_tokens=1, of="a")


def reused_beside_an_abort(engine: ExploredEngine) -> None:
    """Prompts begin alike. The first is aborted at any time, so perhaps while the others wait for its KV, or when they
    hold what it left.
    """
    engine.submit("a", [1, 2, 3, 4], 3, cache_salt=SALT)
    engine.submit("b", [1, 2, 3, 4], 3, cache_salt=SALT)
    engine.submit("c", [1, 2, 9], 2, cache_salt=SALT)
    engine.abort_some_time("a")


def reused_by_a_handoff_lost(engine: ExploredEngine) -> None:
    """The handoff of a request that may hold a prefix breaks while a segment is on its way. A third request, without a
    cache salt, needs slots.
    """
    engine.submit("a", [1, 2, 3, 4], 2, cache_salt=SALT)
    engine.submit("b", [1, 2, 9, 8, 7], 3, cache_salt=SALT)
    engine.submit("c", [7, 8, 9], 3)
    engine.lose_handoff_once("b")


def reused_when_short(engine: ExploredEngine) -> None:
    """Requests with the same prompt run short of slots. Cached KV is evicted, and when the youngest request returns it
    finds what is left of its own KV.
    """
    engine.submit("a", [1, 2, 3], 5, cache_salt=SALT)
    engine.submit("b", [1, 2, 3], 4, cache_salt=SALT)
    engine.submit("c", [1, 2, 5], 3, cache_salt=SALT)


def same_tokens_in_two_namespaces(engine: ExploredEngine) -> None:
    """Four prompts have the same tokens: two have one cache salt, one has another, and one has none. Slots are
    short.
    """
    engine.submit("a", [1, 2, 3, 4], 2, cache_salt="")
    engine.submit("b", [1, 2, 3, 4], 2, cache_salt=SALT)
    engine.submit("c", [1, 2, 3, 4], 2)
    engine.submit("d", [1, 2, 3, 4], 2, cache_salt="")


def aborted_in_a_chunk(engine: ExploredEngine) -> None:
    """Prompts are computed in the decode service. One request is aborted at any time, even while its chunk is in
    flight, and another one takes its row.
    """
    engine.submit("a", [1, 2], 5, cache_salt=SALT)
    engine.submit("b", [1, 2, 7, 8], 2, cache_salt=SALT)
    engine.submit("c", [1, 2, 7], 2, cache_salt=SALT)
    engine.abort_some_time("b", after_tokens=1, of="a")


def aborted_between_chunks(engine: ExploredEngine) -> None:
    """No replica is ready. A request whose prompt is computed in chunks is aborted at any time. Another one, whose
    prompt begins alike, goes on from the KV that the first one left.
    """
    engine.submit("a", [5], 4)
    engine.submit("b", [1, 2, 3, 4, 5, 6, 7, 8, 9], 2, cache_salt=SALT)
    engine.submit("c", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 2, cache_salt=SALT)
    engine.abort_some_time("b", after_tokens=1, of="a")


def retracted_in_a_chunk(engine: ExploredEngine) -> None:
    """No replica is ready. A request grows into the slots of a younger one, whose long prompt is computed in chunks."""
    engine.submit("a", [1], 9, cache_salt=SALT)
    engine.submit("b", range(5, 20), 2, cache_salt=SALT)


def continued_after_a_handoff_lost(engine: ExploredEngine) -> None:
    """A request waits for KV that is handed over for another one, and will have few tokens to compute then. That
    handoff is lost, and meanwhile a third request's prompt is computed.
    """
    engine.submit("a", [1, 2, 3, 4, 5], 2, cache_salt=SALT)
    engine.submit("b", [1, 2, 3, 4, 5, 6], 2, cache_salt=SALT)
    engine.submit("c", [7, 8], 4, cache_salt=SALT)
    engine.lose_handoff_once("a")


def continued_beside_a_replica_lost(engine: ExploredEngine) -> None:
    """The replica leaves at any time and comes back. Meanwhile the decode service computes prompts in chunks, and new
    requests wait for their KV.
    """
    engine.submit("a", [1, 2, 3, 4, 5, 6, 7], 2, cache_salt=SALT)
    engine.submit("b", [1, 2, 3, 4, 5, 6, 8], 3, cache_salt=SALT)
    engine.lose_replica_some_time(returns=True)


def windows_beside_an_abort(engine: ExploredEngine) -> None:
    """Tokens leave the windows of requests, and others take their slots. One request is aborted at any time. The last
    one, whose KV is handed over, may need slots of its window.
    """
    engine.submit("a", [1, 2], 9)
    engine.submit("b", [5, 6, 7], 8)
    engine.submit("c", [8, 9, 10, 11], 3)
    engine.abort_some_time("b", after_tokens=2)


def windows_lost_and_got_back(engine: ExploredEngine) -> None:
    """A request leaves its KV, and another one takes most slots of its windows. Then two requests come together that
    use what is left: one of them is aborted at any time, even while it gets the window again.
    """
    prompt = [1, 2, 3, 4, 5, 6]

    def come_together() -> None:
        engine.submit("c", prompt, 3, cache_salt=SALT)
        engine.submit("d", prompt, 3, cache_salt=SALT)
        engine.abort_some_time("c")

    engine.submit("a", prompt, 4, cache_salt=SALT)
    engine.follow("a", lambda: engine.submit("b", [7, 8], 8))
    engine.follow("b", come_together)
