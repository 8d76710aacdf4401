"""Tests of queued prompts: they get rows and places in a forward by priority and by how long they have waited, fail if
they are late, and wait for their matchers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from common.engine import Place
from common.errors import RowFailure
from common.grammar.grammar import TokenRules
from common.grammar.matcher import TokenRulesMatcher
from common.model.target import TargetModel
from common.priority import Ageing
from common.sampling.params import ResolvedSampling
from common.wire.handoff import HandoffRow, PrebuiltBatch, RowFailed
from prefill_service.messages import CancelCallRows, FailRow, GiveMatcher, OpenCall
from prefill_service.prompt import Prompt, PromptLives
from tests.support.engines import PrefillHalf, handoff_rows
from tests.support.models import VOCAB_SIZE
from tests.support.scripted_device import ScriptedDevice

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

    def open(
        self,
        name: str,
        *,
        priority: int = 0,
        client: str = "",
        first_token: int = 1,
        num_rows: int = 1,
        num_chunks: int = 1,
    ) -> None:
        token_ids = range(first_token, first_token + num_chunks * NUM_TOKENS)
        rows = handoff_rows([token_ids] * num_rows, ResolvedSampling(seed=1, max_tokens=1))
        self.num_opened += num_rows
        rows = [replace(row, priority=priority, client=client, cache_salt="") for row in rows]
        self.half.step(OpenCall(name, tuple(rows)))

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


@pytest.mark.parametrize("max_rows", [1, 8], ids=["for rows", "for places in a forward"])
def test_a_client_that_comes_goes_before_what_others_have_waiting(
    max_rows: int, tiny_target: Callable[[str], TargetModel]
) -> None:
    """However long the others have waited: waiting makes no prompt better than one of priority 0."""
    prompts = Prompts(tiny_target("llama"), max_rows=max_rows)
    for name in ("a1", "a2", "a3", "a4"):
        prompts.open(name, client="a", num_chunks=2)
    prompts.now_s = 10 * STEP_S
    for name in ("b1", "c1", "b2"):
        prompts.open(name, client=name[0])
    assert prompts.order() == ["a1", "b1", "c1", "b2", "a2", "a3", "a4"], "those of a are twice as long"


def test_a_prompt_for_whose_kv_another_client_waits_has_that_ones_turn(
    tiny_target: Callable[[str], TargetModel],
) -> None:
    prompts = Prompts(tiny_target("llama"), max_rows=8, prefix_cache=True)
    prompts.open("a1", client="a", num_chunks=2)
    prompts.open("a2", client="a", first_token=20)
    prompts.open("a3", client="a", first_token=40)
    prompts.open("b1", client="b", first_token=40)
    assert prompts.order()[:2] == ["a1", "a3"]


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


def test_a_full_queue_is_put_in_order_once_for_all_rows_of_a_call(
    tiny_target: Callable[[str], TargetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = Prompts(tiny_target("llama"), max_rows=1, max_queued_rows=1)
    prompts.open("first", priority=0)
    in_turn = PromptLives.in_turn
    num_orders: list[int] = []

    def counted(self: PromptLives, place: Place, now_s: float) -> dict[Prompt, int]:
        num_orders.append(len(self.at(place)))
        return in_turn(self, place, now_s)

    monkeypatch.setattr(PromptLives, "in_turn", counted)
    prompts.open("many", priority=0, num_rows=9)
    assert len(prompts.half.failures) == 8
    assert sum(num > 1 for num in num_orders) == 1


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


def test_a_late_prompt_fails_before_it_is_given_a_row(tiny_target: Callable[[str], TargetModel]) -> None:
    """By the time that was left when it was sent: the services' clocks may differ by any amount."""
    now_s = 1000.0
    device = ScriptedDevice()  # the first prompt keeps the only row
    prefill = PrefillHalf(tiny_target("llama"), device, max_rows=1, clock=lambda: now_s)
    sampling = ResolvedSampling(seed=1, max_tokens=4)
    prefill.step(OpenCall("first", (HandoffRow("first", 0, (11, 12, 13), 3, sampling),)))
    rows = tuple(HandoffRow(f"{ms} ms", 0, (11, 12, 13), 3, sampling, time_left_ms=ms) for ms in (0, 1500, 1501, 1))
    prefill.step(OpenCall("call", rows))
    assert not prefill.failures
    now_s += 1.5
    prefill.step()
    assert [(failed.row, failed.reason, failed.retryable) for failed in prefill.failures] == [
        (1, RowFailure.DEADLINE, False),
        (3, RowFailure.DEADLINE, False),
    ]
    assert not prefill.ended_calls, "two rows are still alive"
    prefill.close()


ONLY = 77
RULES = TokenRules(allowed_ids=(ONLY,))


def test_a_row_is_computed_when_its_matcher_is_there(tiny_target: Callable[[str], TargetModel]) -> None:
    prefill = PrefillHalf(tiny_target("llama"))
    free, constrained = handoff_rows([range(5, 10), range(5, 11)])
    constrained = replace(constrained, sampling=ResolvedSampling(seed=1, max_tokens=4, token_rules=RULES))
    prefill.step(OpenCall("call", (constrained, free, constrained, constrained)))
    while not prefill.first_tokens:
        prefill.step()
    assert [row for row, _ in prefill.first_tokens] == [1]
    assert prefill.engine.load().num_queued == 3
    failed = RowFailed(row=2, reason=RowFailure.CAPACITY, retryable=True, message="too late")
    matcher = TokenRulesMatcher(None, RULES, (), vocab_size=VOCAB_SIZE)
    prefill.step(GiveMatcher("call", 0, matcher), FailRow("call", failed), CancelCallRows("call", (3,)))
    prefill.step(GiveMatcher("call", 3, matcher), FailRow("call", replace(failed, row=3)))  # it has ended
    while "call" not in prefill.ended_calls:
        prefill.step()
    assert prefill.first_tokens[1:] == [(0, ONLY)]
    cancelled = RowFailed(3, RowFailure.CANCELLED, retryable=False, message="cancelled by the decode service")
    assert prefill.failures == [replace(failed, retry_after_ms=200), cancelled]
    prefill.close()
