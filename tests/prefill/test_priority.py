"""Tests that prompts get rows and places in a forward by priority, and by how long they have waited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from common.device.scripted import ScriptedDevice
from common.errors import RowFailure
from common.model.target import TargetModel
from common.priority import Ageing
from common.sampling.params import ResolvedSampling
from common.wire.handoff import PrebuiltBatch, RowFailed
from prefill_service.messages import OpenCall
from tests.support.engines import PrefillHalf, handoff_rows

STEP_S = 10.0
NUM_TOKENS = 12


class Prompts:
    """A prefill engine that computes one prompt in a forward. Each prompt has a call of its own.

    Nothing is computed while prompts are opened, so the first keeps its row until `order` is called.
    """

    def __init__(
        self, target: TargetModel, *, max_rows: int, max_queued_rows: int = 64, prefix_cache: bool = False
    ) -> None:
        self.now_s = 0.0
        self.num_opened = 0
        self.device = ScriptedDevice()
        self.half = PrefillHalf(
            target,
            self.device,
            max_rows=max_rows,
            max_queued_rows=max_queued_rows,
            prefix_cache=prefix_cache,
            max_batch_tokens=NUM_TOKENS,
            chunk_tokens=NUM_TOKENS,
            ageing=Ageing(STEP_S),
            clock=lambda: self.now_s,
            overlap=False,
        )

    def open(self, name: str, *, priority: int, first_token: int = 1, num_rows: int = 1, num_chunks: int = 1) -> None:
        token_ids = range(first_token, first_token + num_chunks * NUM_TOKENS)
        rows = handoff_rows([token_ids] * num_rows, ResolvedSampling(seed=1, max_tokens=1))
        self.num_opened += num_rows
        self.half.step(OpenCall(name, tuple(replace(row, priority=priority, cache_salt="") for row in rows)))

    def order(self) -> list[str]:
        """Computes all prompts and returns their calls in the order of their first tokens."""
        while len(self.half.first_tokens) < self.num_opened:
            self.device.run_all()
            self.half.step()
        self.half.close()
        return [ready.call_id for ready in self.half.frames if isinstance(ready.frame, PrebuiltBatch)]


def test_queued_prompts_get_rows_by_priority(tiny_target: Callable[[str], TargetModel]) -> None:
    prompts = Prompts(tiny_target("llama"), max_rows=1)
    for name, priority in (("first", 2), ("low", 2), ("high", 0), ("best", -1), ("high too", 0)):
        prompts.open(name, priority=priority)
    assert prompts.order() == ["first", "best", "high", "high too", "low"]


def test_prompts_that_hold_rows_are_computed_by_priority(tiny_target: Callable[[str], TargetModel]) -> None:
    prompts = Prompts(tiny_target("llama"), max_rows=4)
    for name, priority in (("first", 2), ("low", 2), ("high", 0), ("high too", 0)):
        prompts.open(name, priority=priority)
    assert prompts.order() == ["first", "high", "high too", "low"]


def test_waiting_makes_a_prompt_as_good_as_a_better_one_that_comes_later(
    tiny_target: Callable[[str], TargetModel],
) -> None:
    prompts = Prompts(tiny_target("llama"), max_rows=1)
    prompts.open("first", priority=0)
    prompts.open("low", priority=3)
    prompts.now_s = 3 * STEP_S - 1
    prompts.open("in time", priority=0)
    prompts.now_s = 3 * STEP_S + 1
    prompts.open("too late", priority=0)
    assert prompts.order() == ["first", "in time", "low", "too late"]


def test_a_full_queue_refuses_what_it_would_compute_last(tiny_target: Callable[[str], TargetModel]) -> None:
    prompts = Prompts(tiny_target("llama"), max_rows=1, max_queued_rows=2)
    for name, priority in (("first", 0), ("low", 3), ("lower", 4), ("high", 0), ("lowest", 5)):
        prompts.open(name, priority=priority)
    refused = [ready.call_id for ready in prompts.half.frames if isinstance(ready.frame, RowFailed)]
    assert refused == ["lower", "lowest"]
    assert all(failed.reason is RowFailure.CAPACITY and failed.retryable for failed in prompts.half.failures)
    prompts.num_opened -= 2
    assert prompts.order() == ["first", "high", "low"]


def test_a_call_of_several_rows_ends_when_a_full_queue_refuses_them(tiny_target: Callable[[str], TargetModel]) -> None:
    prompts = Prompts(tiny_target("llama"), max_rows=1, max_queued_rows=1)
    prompts.open("first", priority=0)
    prompts.open("queued", priority=0)
    prompts.open("two", priority=0, num_rows=2)
    refused = [ready.call_id for ready in prompts.half.frames if isinstance(ready.frame, RowFailed)]
    assert refused == ["two", "two"]
    prompts.num_opened -= 2
    assert prompts.order() == ["first", "queued"]


def test_a_prompt_that_brings_kv_for_a_better_one_is_computed_as_early(
    tiny_target: Callable[[str], TargetModel],
) -> None:
    prompts = Prompts(tiny_target("llama"), max_rows=16, prefix_cache=True)
    prompts.open("source", priority=100, num_chunks=4)
    prompts.open("waits for it", priority=0, num_chunks=4)
    for number in range(6):
        prompts.open(f"later {number}", priority=0, first_token=60 + 14 * number)
    order = prompts.order()
    assert order.index("waits for it") < order.index("later 3"), order
