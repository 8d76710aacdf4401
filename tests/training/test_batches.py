"""Compares the rows of training batches with loops over single positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.training.cases import make_conversations
from training.batches import BatchSource
from training.data import Conversations, Ints
from training.features import Features
from training.vocabulary import UNKNOWN

_NUM_STEPS = 2
_DRAFT_IDS = np.where(np.arange(100) % 5 == 0, UNKNOWN, np.arange(100))
"""The draft id of each target id. Every fifth target id is outside the draft vocabulary."""


@pytest.fixture
def conversations() -> Conversations:
    return make_conversations([range(10, 17), range(20, 32), range(40, 44), range(50, 59)], [3, 4, 1, 8])


@pytest.fixture
def features(conversations: Conversations) -> Features:
    """Returns features in which each position holds its own index. The target's most likely token there is twice the
    index plus one.
    """
    places = np.arange(conversations.tokens.size)
    bits = torch.from_numpy(places).to(torch.bfloat16).view(torch.uint16).numpy()
    return Features(np.stack([bits] * 3, axis=1), bits[:, None], (2 * places + 1).astype(np.int32))


@pytest.fixture
def source(conversations: Conversations, features: Features) -> BatchSource:
    return BatchSource(
        conversations,
        features,
        draft_ids=_DRAFT_IDS,
        num_steps=_NUM_STEPS,
        batch_tokens=16,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("group", [[0], [1, 0], [2, 3, 1]])
def test_rows_are_those_whose_drafts_are_answer_tokens(
    source: BatchSource, conversations: Conversations, features: Features, group: list[int]
) -> None:
    batch = source.load(np.array(group))
    learned, chains = [], []
    for row, each in enumerate(group):
        start, size = conversations.offsets[each], conversations.lengths[each]
        is_answer = [place >= conversations.answer_start[each] for place in range(size)] + [False] * 9
        best = [_DRAFT_IDS[features.argmax[start + place]] for place in range(size)] + [UNKNOWN] * 9
        for place in range(size):
            rows = [row * batch.length + place - 1 - step for step in range(_NUM_STEPS)]
            if place >= _NUM_STEPS and is_answer[place + 1] and best[place] != UNKNOWN:
                learned.append((rows[0], float(start + place)))
            if is_answer[place + 2] and is_answer[place + 1 + _NUM_STEPS]:
                chains.append((row * batch.length + place, best[place + 1 : place + 1 + _NUM_STEPS]))
        assert batch.token_ids[row, :size].tolist() == conversations.tokens[start : start + size].tolist()
        assert batch.aux[row, :size, 1].tolist() == list(range(start, start + size))
        assert not batch.aux[row, size:].any() and not batch.token_ids[row, size:].any()
    assert list(zip(batch.rows.tolist(), batch.final[:, 0].tolist(), strict=True)) == learned
    assert list(zip(batch.chain_rows.tolist(), batch.chain_ids.tolist(), strict=True)) == chains
    assert batch.num_answer_tokens == sum(
        conversations.lengths[each] - conversations.answer_start[each] for each in group
    )


def test_a_batch_has_at_most_the_tokens_asked_for_and_alike_lengths(
    source: BatchSource, conversations: Conversations
) -> None:
    groups = [group.tolist() for group in source.grouped(np.arange(4))]
    assert groups == [[2, 0], [3], [1]]


def test_an_epoch_is_every_conversation_once_in_an_order_of_its_own(source: BatchSource) -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        return [group.tolist() for group in source.epoch(_CHOSEN, seed=seed, epoch=epoch)]

    assert sorted(np.concatenate(order(0, 0)).tolist()) == _CHOSEN.tolist()
    assert order(0, 1) == order(0, 1)
    assert len({str(order(0, epoch)) for epoch in range(20)}) > 1
    assert len({str(order(seed, 0)) for seed in range(20)}) > 1


_CHOSEN: Ints = np.array([0, 1, 2, 3])
