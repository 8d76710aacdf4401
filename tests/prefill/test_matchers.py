"""Tests that a constrained row waits for its matcher, and holds no other row back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from common.errors import RowFailure
from common.grammar.grammar import TokenRules
from common.grammar.token_rules_matcher import TokenRulesMatcher
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from common.wire.handoff import RowFailed
from prefill_service.messages import CancelCallRows, FailRow, GiveMatcher, OpenCall
from tests.support.engines import PrefillHalf, handoff_rows
from tests.support.models import VOCAB_SIZE

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
    assert [(failed.row, failed.reason, failed.message) for failed in prefill.failures] == [
        (2, RowFailure.CAPACITY, "too late"),
        (3, RowFailure.CANCELLED, "cancelled by the decode service"),
    ]
    prefill.close()
