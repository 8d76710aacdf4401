"""Tests of the masks of grammars: nothing forbidden is drawn, the rest is drawn as if the forbidden tokens did not
exist, and the masks of a draft tree are those that a new matcher would make.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.grammar.grammar import Grammar, GrammarKind
from common.grammar.matcher import ALL_ALLOWED, Mask, Matcher, MinLength, fill_nodes, mask_of, num_words
from common.sampling.operators import sample
from common.sampling.params import ResolvedSampling
from common.sampling.state import RowStart, SamplingBatch, SamplingState
from common.sampling.triton_draws import TritonDraws
from tests.support.models import END_ID, VOCAB_SIZE, make_tokenizer
from tests.support.pair import grammars_of

VOCAB = 70
GRAMMAR = Grammar(GrammarKind.REGEX, "a")  # which one does not matter: the masks are given
NO_MINIMUM = MinLength(0, ())
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.5, "num_logprobs": 2},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.02},
    {"temperature": 1.0, "logit_bias": ((3, 4.0),), "presence_penalty": 0.5},
]


def packed(allowed: Tensor) -> Tensor:
    """Packs booleans [rows, vocab] (True for an allowed token) into masks."""
    bits = np.zeros((allowed.shape[0], 32 * num_words(allowed.shape[1])), np.uint8)
    bits[:, : allowed.shape[1]] = allowed.numpy()
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize("kernels", [None, TritonDraws()], ids=["operators", "kernels"])
@pytest.mark.parametrize("place", [0, 31, 32, 69])
def test_what_is_drawn_is_as_if_the_forbidden_tokens_had_no_probability(kernels: Any, place: int) -> None:
    """Every other row is constrained. The last word of a mask also has bits past the end of the vocabulary."""
    requests = [
        ResolvedSampling(seed=number, max_tokens=9, grammar=GRAMMAR if number % 2 else None, **options)
        for number, options in enumerate(each for each in OPTIONS for _ in range(2))
    ]
    generator = torch.Generator().manual_seed(place)
    logits = torch.randn(len(requests), VOCAB, generator=generator) * 3
    allowed = torch.rand(len(requests), VOCAB, generator=generator) < 0.2
    allowed[:, place] = True
    allowed[::2] = True
    rows = torch.arange(1, len(requests) + 1)

    def drawn(logits: Tensor, requests: list[ResolvedSampling], masks: Tensor | None) -> Any:
        state = SamplingState(max_rows=32, vocab_size=VOCAB, torch_device=torch.device("cpu"), kernels=kernels)
        state.reset([RowStart(row, each, 0, (1, 2, 3), 2) for row, each in enumerate(requests, start=1)])
        return sample(logits.clone(), rows, torch.full_like(rows, 5), state, SamplingBatch.of(requests), masks=masks)

    found = drawn(logits, requests, packed(allowed[1::2]))
    free = [replace(each, grammar=None) for each in requests]
    expected = drawn(logits.masked_fill(~allowed, float("-inf")), free, None)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert allowed[torch.arange(len(requests)), found.token_ids].all()
    assert found.logprobs.tolist() == pytest.approx(
        torch.log_softmax(logits[2:4], -1).gather(1, found.token_ids[2:4, None])[:, 0].tolist()
    ), "they are of the model's own distribution"


def test_a_row_whose_grammar_allows_nothing_is_invalid() -> None:
    request = ResolvedSampling(seed=3, max_tokens=9, grammar=GRAMMAR)
    state = SamplingState(max_rows=1, vocab_size=VOCAB, torch_device=torch.device("cpu"))
    masks = torch.zeros(1, num_words(VOCAB), dtype=torch.int32)
    one = torch.tensor([1])
    assert sample(torch.zeros(1, VOCAB), one, one, state, SamplingBatch.of([request]), masks=masks).is_invalid.all()


def matcher_of(text: str) -> Matcher:
    return grammars_of(VOCAB_SIZE).matcher(Grammar(GrammarKind.REGEX, text))


def mask_after(text: str, token_ids: list[int]) -> list[int]:
    matcher, mask = matcher_of(text), np.empty(num_words(VOCAB_SIZE), np.int32)
    assert all(map(matcher.accept, token_ids))
    matcher.fill(mask)
    return mask.tolist()


@pytest.mark.parametrize("seed", range(8))
def test_masks_of_a_tree_are_those_of_new_matchers(seed: int) -> None:
    """The draft trees are random. The grammar forbids some of the drafts, and some are the end token."""
    draw = random.Random(seed)
    regex = "([ab]|a[cd]|the){1,6}e?"
    letters = make_tokenizer().convert_tokens_to_ids(["a", "b", "c", "d", "e", "th", "the", "h"])
    parents = [draw.randrange(node) for node in range(1, 16)]
    token_ids = [draw.choice([*letters, END_ID]) for _ in parents]
    masks = np.full((16, num_words(VOCAB_SIZE)), ALL_ALLOWED, np.int32)
    matcher = matcher_of(regex)
    assert matcher.accept(letters[0])
    for _ in range(2):  # the second time shows that the matcher is where it was
        fill_nodes(matcher, masks, NO_MINIMUM, token_ids, parents)
        num_filled = 0
        for node in range(16):
            path, at = [], node
            while at:
                path.append(token_ids[at - 1])
                at = parents[at - 1]
            try:
                expected = mask_after(regex, [letters[0], *reversed(path)])
            except AssertionError:
                assert (masks[node] == ALL_ALLOWED).all(), "what cannot be drawn forbids nothing"
                continue
            num_filled += 1
            assert masks[node].tolist() == expected
        assert num_filled > 1


class Limited(Matcher):
    """A matcher that allows everything, and whose copies fail at the token `at`."""

    def __init__(self, at: int) -> None:
        self._at, self._failure = at, ""

    @property
    def failure(self) -> str:
        return self._failure

    def accept(self, token_id: int) -> bool:
        self._failure = self._failure or ("too large" if token_id == self._at else "")
        return not self._failure

    def copy(self) -> Limited:
        return Limited(self._at)

    def fill(self, mask: Mask) -> None:
        mask[:] = 1

    def forced(self) -> list[int]:
        return []


def test_what_takes_a_copy_to_a_limit_allows_nothing_after_it() -> None:
    masks = np.full((6, num_words(VOCAB_SIZE)), ALL_ALLOWED, np.int32)
    matcher = Limited(at=9)
    failures = fill_nodes(matcher, masks, NO_MINIMUM, [7, 9, 8, 9, 8], [0, 1, 2, 0, 1])
    assert failures == {2: "too large", 4: "too large"} and not matcher.failure
    assert [masks[node, 0] for node in range(6)] == [1, 1, 0, ALL_ALLOWED, 0, 1]


def test_the_end_is_forbidden_before_the_least_length_unless_nothing_else_is_allowed() -> None:
    a = make_tokenizer().convert_tokens_to_ids("a")
    masks = np.empty((3, num_words(VOCAB_SIZE)), np.int32)

    def may_end(regex: str, num_tokens: int) -> list[bool]:
        fill_nodes(matcher_of(regex), masks, MinLength(num_tokens, (END_ID,)), [a, a], [0, 1])
        return [bool(mask[0] >> END_ID & 1) for mask in masks]

    assert may_end("a*", 0) == [True, True, True]
    assert may_end("a*", 2) == [False, False, True]
    assert may_end("a", 3)[:2] == [False, True]


def test_what_is_forced_is_what_the_masks_leave() -> None:
    text = "xthe answer is{0,3}y"
    token_ids = make_tokenizer().encode("xthe answer i", add_special_tokens=False)
    matcher, mask = matcher_of(text), np.empty(num_words(VOCAB_SIZE), np.int32)
    forced = list(matcher.forced())
    assert forced == token_ids[: len(forced)] and len(forced) > 5
    for token_id in forced:
        matcher.fill(mask)
        assert np.array_equal(mask, mask_of([token_id], VOCAB_SIZE))
        assert matcher.accept(token_id)
    assert not list(matcher_of("[xy]z").forced())


def test_a_mask_past_a_limit_of_the_library_allows_nothing() -> None:
    """The library's own mask would let the output end there, as if it were complete."""
    matcher = matcher_of("(a{1,1000}){1,1000}")
    a, mask = make_tokenizer().convert_tokens_to_ids("a"), np.empty(num_words(VOCAB_SIZE), np.int32)
    for _ in range(2000):
        matcher.fill(mask)
        if not mask.any():
            return
        assert mask[0] & ~(1 << END_ID) or mask[1:].any(), "the output may end where it is not complete"
        assert matcher.accept(a)
    raise AssertionError("no limit was reached")
