"""Tests of the training loss and the measured acceptance, with a head that drafts the token it is fed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from training.batches import Batch
from training.objective import Objective

_VOCAB_SIZE, _SCALE = 8, 4.0


class EchoHead:
    def chain(self, aux: Tensor, embedded: Callable[[int], Tensor], num_steps: int) -> Iterator[Tensor]:
        return (embedded(step) for step in range(num_steps))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden * _SCALE


@pytest.fixture
def objective() -> Objective:
    embedding = nn.Embedding.from_pretrained(torch.eye(_VOCAB_SIZE))
    head: Any = EchoHead()
    return Objective(head, embedding, torch.eye(_VOCAB_SIZE), num_steps=2)


def batch(token_ids: list[list[int]], **changes: Any) -> Batch:
    nothing = torch.zeros(0, dtype=torch.int64)
    fields = {
        "token_ids": torch.tensor(token_ids),
        "aux": torch.zeros(len(token_ids), len(token_ids[0]) - 2, 1),
        "final": torch.zeros(0, _VOCAB_SIZE),
        "rows": nothing,
        "chain_rows": nothing,
        "chain_ids": nothing.view(0, 2),
        "num_answer_tokens": 1,
    }
    return Batch(**{**fields, **changes})


def test_acceptance_counts_a_draft_only_while_all_before_it_were_right(objective: Objective) -> None:
    """In this case row i drafts tokens i + 1 and i + 2."""
    first = batch(
        [[0, 1, 2, 3, 4, 5], [7, 6, 5, 4, 3, 2]],
        chain_rows=torch.tensor([0, 2, 5]),
        chain_ids=torch.tensor([[1, 2], [3, 7], [5, 4]]),
    )
    second = batch([[0, 1, 2, 3]], chain_rows=torch.tensor([0]), chain_ids=torch.tensor([[7, 2]]))
    measured = objective.measure([first, second])
    assert measured.accuracy == (0.75, 0.75)
    assert measured.cumulative == (0.75, 0.5)
    assert measured.tau == 2.25


def test_each_step_is_judged_at_its_own_rows_by_the_target_s_distribution(objective: Objective) -> None:
    """The target's distribution at position 3 is what row 2 must learn in step 0, and row 1 in step 1. Both are fed
    token 3.
    """
    final = torch.randn(1, _VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    losses = objective.losses(batch([[0, 1, 2, 3, 4, 5]], final=final, rows=torch.tensor([2])))
    logits = _SCALE * one_hot(torch.tensor([3]), _VOCAB_SIZE).float()
    expected = -(final.softmax(-1) * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(losses, expected.repeat(2))


def test_later_steps_weigh_less(objective: Objective) -> None:
    total = objective.total(torch.tensor([1.0, 2.0]))
    assert total.item() == pytest.approx((1.0 + 0.8 * 2.0) / 1.8)
