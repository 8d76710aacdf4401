"""Tests that the seed which a decode step leaves for the next draft equals the one that prefill would hand over for the
same tokens.

The head is random, so its drafts depend on all of its KV. The target's likeliest tokens are chosen so that the head
sometimes guesses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.draft.seed import DraftSeed
from common.prompts import worker as prefill
from common.prompts.chunk_batch import Chunk
from common.sampling.params import ResolvedSampling
from decode_service.forward import eagle_drafter
from decode_service.forward.eagle_drafter import DraftBacklog, EagleDrafter, UnreadTokens
from decode_service.speculate.depth import FixedDepth
from decode_service.speculate.spec_info import MAX_UNREAD, DraftTree, SpecInfo, Unread
from tests.pair import speculation_mutants as mutants
from tests.pair.speculation_mutants import Mutant
from tests.support.draft_heads import save_eagle3_head
from tests.support.drafted import SHAPES, Drafted, load_drafted
from tests.support.pair import PairOptions, pairs_that_keep_all

NUM_REQUESTS = 5
NEW_TOKENS = 20
NUM_TREES = 40


@pytest.fixture(scope="module")
def random_head(last_token_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    head_dir = save_eagle3_head(tmp_path_factory.mktemp("random-head"), target_dir=last_token_model_dir)
    return load_drafted(last_token_model_dir, head_dir)


@dataclass(frozen=True, slots=True)
class Left:
    """The draft seed that was left for a row of `num_tokens` tokens. The newest of these tokens has no KV yet."""

    num_tokens: int
    seed: dict[str, torch.Tensor]


@contextmanager
def seeds_left_in(module: ModuleType) -> Iterator[list[Left]]:
    """Yields a list that collects the seeds of every draft-extend that `module` runs, row by row."""
    left: list[Left] = []
    extend_draft: Callable[..., DraftSeed] = module.extend_draft  # type: ignore[attr-defined]

    def watched(*given: Any, **named: Any) -> DraftSeed:
        seed = extend_draft(*given, **named)
        if named["positions"].numel():
            left.append(Left(int(named["positions"]), {name: column[0] for name, column in seed.columns().items()}))
        return seed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "extend_draft", watched)
        yield left


class LeftBehind(FixedDepth):
    """Chooses draft depths in a cycle. `num_behind` steps neither draft nor leave a seed, so the head reads their
    tokens later. The next step leaves a seed, and the one after it drafts.
    """

    def __init__(self, spec_info: SpecInfo, num_behind: int) -> None:
        super().__init__(spec_info)
        nothing = spec_info.at_depth(0).without_seed()
        self._steps = cycle([*[nothing] * num_behind, spec_info.at_depth(0), spec_info])
        self._next = next(self._steps)

    def choose(self, *, unread: Unread, num_wanted: int, num_forced: NDArray[np.int64]) -> SpecInfo:
        return self._next

    def launched(self, spec_info: SpecInfo) -> None:
        self._next = next(self._steps)


def check_seeds_are_those_of_prefill(drafted: Drafted, shape: str, *, num_behind: int = 0) -> None:
    num_compared = num_several = 0
    options = PairOptions(**SHAPES[shape])
    new_tokens = NEW_TOKENS + 2 * num_behind
    with pairs_that_keep_all() as make_pair:
        if num_behind:
            options = replace(options, new_depth=partial(LeftBehind, num_behind=num_behind))
        pair = make_pair(drafted.target, options, draft=drafted.head)
        chunks = replace(options, chunk_tokens=8, new_depth=FixedDepth)  # a chunk needs the prompt's token after it
        other = make_pair(drafted.target, chunks, draft=drafted.head)
        for number in range(NUM_REQUESTS):
            prompt = [4 + (number * 11 + place * (number + 3)) % 56 for place in range(5 + 3 * number)]
            sampling = ResolvedSampling(seed=number, max_tokens=new_tokens, temperature=0.7)
            with seeds_left_in(eagle_drafter) as left:
                outcome = pair.submit(str(number), prompt, sampling)
                pair.run()
            tokens = [*prompt, *outcome.token_ids]
            before = len(prompt) + 1
            for each in [each for each in left if each.num_tokens < len(tokens)]:
                num_output = each.num_tokens - len(prompt)
                resumed = ResolvedSampling(seed=number, max_tokens=num_output, temperature=0.7)
                with seeds_left_in(prefill) as handed_over:
                    name = f"{number}-{each.num_tokens}"
                    other.submit(name, tokens[: each.num_tokens - 1], resumed, prompt_len=len(prompt))
                    other.run()
                assert [wanted.num_tokens for wanted in handed_over] == [each.num_tokens]
                for name, column in handed_over[0].seed.items():
                    is_same = torch.allclose(each.seed[name].double(), column.double(), rtol=1e-3, atol=1e-4)
                    assert is_same, f"{name} after {each.num_tokens} tokens is not what prefill hands over"
                num_compared += 1
                num_several += each.num_tokens - before > 1
                before = each.num_tokens
    assert num_compared > NUM_REQUESTS
    assert num_behind or num_several > NUM_REQUESTS, f"only {num_several} of {num_compared} steps accepted drafts"


@pytest.mark.parametrize("shape", ["chain-3", pytest.param("tree-4x3-15", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "num_behind",
    [0, *(pytest.param(number, marks=pytest.mark.thorough) for number in (1, MAX_UNREAD + 1))],
)
def test_seeds_are_those_of_prefill_after_steps_that_left_the_head_behind_too(
    shape: str, num_behind: int, random_head: Drafted
) -> None:
    check_seeds_are_those_of_prefill(random_head, shape, num_behind=num_behind)


def unread_a_position_late(patch: pytest.MonkeyPatch) -> None:
    unread = DraftBacklog.unread

    def mutant(self: DraftBacklog, *given: Any) -> UnreadTokens:
        all_unread = unread(self, *given)
        moved = replace(all_unread.forward_input, positions=all_unread.forward_input.positions + 1)
        return replace(all_unread, forward_input=moved)

    patch.setattr(DraftBacklog, "unread", mutant)


def unread_states_lost(patch: pytest.MonkeyPatch) -> None:
    unread = DraftBacklog.unread

    def mutant(self: DraftBacklog, *given: Any) -> UnreadTokens:
        all_unread = unread(self, *given)
        return replace(all_unread, captured=all_unread.captured.zero_())

    patch.setattr(DraftBacklog, "unread", mutant)


def chunk_without_the_next_token(patch: pytest.MonkeyPatch) -> None:
    """Gives the head token 0 as the one that follows a chunk."""
    next_ids = Chunk.next_ids
    patch.setattr(Chunk, "next_ids", lambda self, num_ahead: np.append(next_ids(self, num_ahead)[:-1], 0))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mutant", "shape", "num_behind"),
    [
        (mutants.drafted_kv_left_in_place, "chain-3", 0),
        (mutants.states_of_other_nodes_extended, "chain-3", 0),
        (mutants.seed_of_the_windows_last_row, "tree-4x3-15", 0),
        (chunk_without_the_next_token, "chain-3", 0),
        (unread_a_position_late, "chain-3", 3),
        (unread_states_lost, "chain-3", 3),
    ],
)
def test_it_is_seen(
    mutant: Mutant, shape: str, num_behind: int, random_head: Drafted, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="is not what prefill hands over"):
        check_seeds_are_those_of_prefill(random_head, shape, num_behind=num_behind)


# ---- a tree branches off the chain ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Branches:
    """The start of a draft tree: its likeliest first draft with the likeliest next one, and all drafts that directly
    follow these two.
    """

    first: int
    second: int
    thirds: tuple[int, ...]


def branches_of(tree: DraftTree) -> Branches:
    tokens, parents = tree.token_ids[0].tolist(), tree.parents[0].tolist()

    def children(node: int) -> list[int]:
        return [place + 1 for place, parent in enumerate(parents) if parent == node]

    first = children(0)[0]
    second = children(first)[0]
    return Branches(tokens[first - 1], tokens[second - 1], tuple(tokens[node - 1] for node in children(second)))


def first_drafts(drafted: Drafted, options: PairOptions) -> list[DraftTree]:
    """Returns the first tree that is drafted for each of NUM_TREES requests. Each request runs alone."""
    trees: list[DraftTree] = []
    draft = EagleDrafter.draft

    def watched(self: EagleDrafter, *given: Any) -> DraftTree:
        trees.append(draft(self, *given))
        return trees[-1]

    first = []
    with pytest.MonkeyPatch.context() as patch, pairs_that_keep_all() as make_pair:
        patch.setattr(EagleDrafter, "draft", watched)
        pair = make_pair(drafted.target, options, draft=drafted.head)
        for number in range(NUM_TREES):
            prompt = [4 + (number * 11 + place * 7) % 56 for place in range(3 + number % 9)]
            pair.submit(str(number), prompt, ResolvedSampling(seed=number, max_tokens=2, temperature=1.0))
            pair.run()
            first.append(trees[0])
            trees.clear()
    return first


def check_the_likeliest_path_is_the_chain(drafted: Drafted) -> None:
    """Checks that the tree's likeliest path is what a chain drafts: the siblings change nothing."""
    chains = first_drafts(drafted, PairOptions(num_draft_tokens=3))
    trees = first_drafts(drafted, PairOptions(draft_topk=3, num_draft_steps=3, num_draft_tokens=21))
    num_compared = 0
    for chain, tree in zip(chains, trees, strict=True):
        branches, (first, second, third) = branches_of(tree), chain.token_ids[0].tolist()
        assert (branches.first, branches.second) == (first, second), "a tree's first path is not the chain"
        if branches.thirds:
            assert branches.thirds[0] == third, "what follows a path depends on its siblings"
            num_compared += 1
    assert num_compared > NUM_TREES / 2


@pytest.mark.thorough
def test_the_likeliest_path_is_the_chain(random_head: Drafted) -> None:
    check_the_likeliest_path_is_the_chain(random_head)


@pytest.mark.thorough
def test_it_is_seen_when_siblings_attend_each_other(random_head: Drafted, monkeypatch: pytest.MonkeyPatch) -> None:
    mutants.draft_mask_is_causal(monkeypatch)
    with pytest.raises(AssertionError, match="depends on its siblings"):
        check_the_likeliest_path_is_the_chain(random_head)
