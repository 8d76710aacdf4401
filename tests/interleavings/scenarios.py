"""Small lives of a decode engine, for all their orders to be run: the real scheduler, batch, relay and pool.

The model and the head are made of tags (tests/engine/tags.py): each token is a hash of everything that it depends on,
so whatever was read too early, too late or from another request shows as a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from common.device.scripted import ScriptedDevice
from decode_service.future_map import FutureMap
from decode_service.messages import Abort, Command, Event
from decode_service.scheduler import DecodeEngine
from decode_service.spec_info import SpecInfo
from tests.engine.harness import ScriptedEngine
from tests.engine.speculating import CHAIN, TREE, assert_drafted_as_expected
from tests.engine.tag_head import DRAFT
from tests.interleavings.explored_device import ExploredDevice, Shared
from tests.interleavings.races import check_no_races

Body = Callable[["ExploredEngine"], None]
_INBOX = "inbox"


class ExploredEngine(ScriptedEngine):
    """Handoffs and aborts come when the explorer lets them: as pieces of streams of their own, "wire" and "client".

    A handoff comes whole, or where `frames_come_apart` frame by frame.
    """

    def __init__(
        self, device: ExploredDevice, *, max_rows: int, max_kv_tokens: int, frames_come_apart: bool, **options: Any
    ) -> None:
        # Debug checks look at the whole table each step, which would be an order of its own.
        super().__init__(device=device, max_rows=max_rows, max_kv_tokens=max_kv_tokens, debug_checks=False, **options)
        self._explored = device
        self._wire = device.new_stream("wire")
        self._client = device.new_stream("client")
        self._frames_come_apart = frames_come_apart
        self.must_retract = False

    def hand_over(self, request_id: str, *, last: str = DRAFT.name) -> None:
        before = len(self._posted)
        with self._explored.unwatched():
            super().hand_over(request_id, last=last)
        commands = self.hold_back(len(self._posted) - before)
        for part in [[command] for command in commands] if self._frames_come_apart else [commands]:
            self._wire.enqueue(partial(self._deliver, *part))

    def abort_some_time(self, request_id: str) -> None:
        """What is handed over for it all the same comes too late for the engine."""

        def abort() -> None:
            self.outcomes[request_id].is_abandoned = True
            self._deliver(Abort(request_id))

        self._client.enqueue(abort)

    def step(self) -> list[Event]:
        self._explored.point()
        self._look_into_the_inbox()
        return super().step()

    def live(self) -> None:
        """Go on, handing over what the engine asks for, until every request has ended and all is free again."""
        self.run(advance=self._rest)

    def _is_over(self) -> bool:
        self._look_into_the_inbox()
        return super()._is_over()

    def _look_into_the_inbox(self) -> None:
        self._explored.current.footprint.reads.add(_INBOX)

    def _deliver(self, *commands: Command) -> None:
        for command in commands:
            self.post(command)
        self._explored.current.footprint.writes.add(_INBOX)

    def _rest(self, device: ScriptedDevice) -> None:
        if self.engine.idle_timeout_s() > 0:
            self._explored.idle()


@dataclass(frozen=True, slots=True)
class Scenario:
    """`body` says what is asked of an engine of so many rows and slots; its whole life is then explored.

    `lags`: the schedule side is behind the host, as on a GPU.
    """

    body: Body
    max_rows: int
    max_kv_tokens: int
    spec_info: SpecInfo | None = None
    overlap: bool = True
    lags: bool = False
    frames_come_apart: bool = False

    @property
    def name(self) -> str:
        speculation = {None: "plain", CHAIN: "chain", TREE: "tree"}[self.spec_info]
        parts = {
            self.body.__name__: True,
            speculation: True,
            f"{self.max_rows}_rows": True,
            "no_overlap": not self.overlap,
            "lagging": self.lags,
            "frames": self.frames_come_apart,
        }
        return "-".join(part for part, is_there in parts.items() if is_there)

    def program(self, device: ExploredDevice) -> None:
        """A Program."""
        if self.lags:
            device.lag_schedule_side()
        engine = ExploredEngine(
            device,
            max_rows=self.max_rows,
            max_kv_tokens=self.max_kv_tokens,
            spec_info=self.spec_info,
            overlap=self.overlap,
            frames_come_apart=self.frames_come_apart,
        )
        with device.exploring(shared_by(engine.engine)):
            self.body(engine)
            engine.live()
        check_no_races(device.trace)
        assert not engine.must_retract or engine.engine.load().num_retractions, "nothing was retracted"
        for request_id, outcome in engine.outcomes.items():
            wanted = outcome.expected[: len(outcome.token_ids)] if outcome.is_abandoned else outcome.expected
            assert outcome.error is None, f"{request_id} failed: {outcome.error}"
            assert outcome.token_ids == wanted, f"{request_id} was decoded wrongly: {outcome.token_ids}, not {wanted}"
            if self.spec_info is CHAIN and not outcome.is_abandoned and not engine.engine.load().num_retractions:
                assert_drafted_as_expected(outcome)


def shared_by(engine: DecodeEngine) -> Iterator[Shared]:
    """What the engine's thread and its streams both touch, all of it allocated at start-up."""
    for name, buffer in engine.pool.buffers.items():
        yield Shared(f"kv of {name}", buffer, 2)
    yield Shared("token table", engine.pool.rows.req_to_token, is_written_by_host_alone=True)
    for holder in (engine.future_map, engine._sampling_state, getattr(engine._worker, "_backlog", None)):
        attributes = {} if holder is None else _attributes(holder)
        for name, value in attributes.items():
            if isinstance(value, Tensor) and value.dim() and value.shape[0] == engine.pool.rows.max_rows + 1:
                yield Shared(f"{type(holder).__name__}.{name}", value, 0)


def _attributes(holder: object) -> dict[str, object]:
    return {**vars(holder), **(holder.seeds if isinstance(holder, FutureMap) else {})}


# ---- bodies -----------------------------------------------------------------------------------------------------


def one_request(engine: ExploredEngine) -> None:
    engine.submit("a", [1, 2, 3], 4)


def two_requests(engine: ExploredEngine) -> None:
    """Each is handed over, bootstrapped and finished beside the other's forwards, or behind it where rows are short."""
    engine.submit("a", [1, 2], 3)
    engine.submit("b", [5, 6, 7], 3)


def four_requests(engine: ExploredEngine) -> None:
    for number in range(4):
        engine.submit(str(number), [number + 1, 7], 3)


def one_aborted(engine: ExploredEngine) -> None:
    """A request is aborted at any time: queued, landing, in flight. The other takes its row or its slots."""
    engine.submit("a", [1, 2], 3)
    engine.submit("b", [5, 6, 7], 3)
    engine.abort_some_time("a")


def growing_beside_an_abort(engine: ExploredEngine) -> None:
    """A request is aborted at any time, also while its KV is copied in; a running one grows into what it held."""
    engine.submit("a", [1, 2], 5)
    engine.submit("b", [5, 6, 7], 3)
    engine.abort_some_time("b")


def short_of_slots(engine: ExploredEngine) -> None:
    """The younger request gives its slots back while a forward holds them, and returns."""
    engine.submit("a", [1, 2], 20)
    engine.submit("b", [5, 6], 20)
    engine.must_retract = True
