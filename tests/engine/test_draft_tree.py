"""Compares draft trees with a plain walk from node to node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from decode_service.speculate.spec_info import AcceptedPath, DraftTree
from tests.engine.mutants.kinds import Mutant, instead_of

MakeTree = Callable[..., DraftTree]

NUM_TOKENS = 4
"""Size of the vocabulary. It is so small that some drafts are right by chance."""


@dataclass(frozen=True, slots=True)
class PlainTree:
    """One row's draft tree as lists. Node 0 is the root and has no token; node i has the token `tokens[i - 1]` and the
    parent `parents[i - 1]`.
    """

    tokens: list[int]
    parents: list[int]
    target: list[int]

    def line_of(self, node: int) -> list[int]:
        """Returns the path from the root to the node."""
        return [0] if node == 0 else [*self.line_of(self.parents[node - 1]), node]

    def accepted(self) -> list[int]:
        """Returns the nodes that the target accepts, found by walking down one level at a time."""
        nodes = [0]
        while True:
            right = [
                place + 1
                for place, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True))
                if parent == nodes[-1] and token == self.target[nodes[-1]]
            ]
            if not right:
                return nodes
            nodes.append(right[0])


@st.composite
def plain_trees(draw: st.DrawFn, *, num_drafts: int) -> PlainTree:
    """Draws a tree in which a parent comes before its children and siblings have different tokens."""
    parents = [draw(st.integers(0, node)) for node in range(num_drafts)]
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        taken = [token for token, other in zip(tokens, parents[:node], strict=True) if other == parent]
        free = [token for token in range(NUM_TOKENS) if token not in taken]
        assume(free)
        tokens.append(draw(st.sampled_from(free)))
    target = draw(st.lists(st.integers(0, NUM_TOKENS - 1), min_size=num_drafts + 1, max_size=num_drafts + 1))
    return PlainTree(tokens, parents, target)


@st.composite
def rows_of_trees(draw: st.DrawFn) -> list[PlainTree]:
    num_drafts = draw(st.integers(1, 9))
    return draw(st.lists(plain_trees(num_drafts=num_drafts), min_size=1, max_size=4))


def tree_of(rows: list[PlainTree]) -> DraftTree:
    num_levels = max(len(row.line_of(node)) - 1 for row in rows for node in range(len(row.target)))
    tokens = torch.tensor([row.tokens for row in rows])
    return DraftTree.of(tokens, torch.tensor([row.parents for row in rows]), num_levels=num_levels)


def assert_nodes_know_their_lines(rows: list[PlainTree]) -> None:
    tree = tree_of(rows)
    ancestors = tree.ancestors()
    num_nodes = tree.num_nodes
    for i, row in enumerate(rows):
        for node in range(num_nodes):
            line = row.line_of(node)
            assert tree.mask[i, node].nonzero().flatten().tolist() == line, "a node attends another line"
            assert int(tree.depths()[i, node]) == len(line) - 1, "a node is at another depth"
            counted = ancestors.counted[i * num_nodes + node].bool()
            tokens = ancestors.token_ids[i * num_nodes + node][counted].tolist()
            assert tokens == [row.tokens[each - 1] for each in line[1:]], "another line's tokens are counted"


def assert_the_walk_is_accepted(rows: list[PlainTree]) -> None:
    tree = tree_of(rows)
    accepted = tree.accept(torch.tensor([row.target for row in rows]))
    assert accepted.path.shape[1] == tree.num_levels + 1
    for row, path, accept_len in zip(rows, accepted.path.tolist(), accepted.accept_lens.tolist(), strict=True):
        assert path[:accept_len] == row.accepted(), "another path was accepted"


@settings(max_examples=100)
@given(rows_of_trees())
def test_a_node_knows_its_line(rows: list[PlainTree]) -> None:
    assert_nodes_know_their_lines(rows)


@settings(max_examples=100)
@given(rows_of_trees())
def test_what_is_accepted_is_what_a_walk_takes(rows: list[PlainTree]) -> None:
    assert_the_walk_is_accepted(rows)


@settings(max_examples=50)
@given(st.integers(0, 6), st.data())
def test_a_chain_is_the_tree_without_branches(num_drafts: int, data: st.DataObject) -> None:
    numbers = st.integers(0, NUM_TOKENS - 1)
    tokens = torch.tensor([data.draw(st.lists(numbers, min_size=num_drafts, max_size=num_drafts)) for _ in range(3)])
    target = torch.tensor([data.draw(st.lists(numbers, min_size=num_drafts + 1, max_size=num_drafts + 1))] * 3)
    chain = DraftTree.chain(tokens.to(torch.int64))
    tree = DraftTree.of(tokens.to(torch.int64), torch.arange(num_drafts).expand(3, -1), num_levels=num_drafts)
    assert chain.is_chain and not tree.is_chain
    assert torch.equal(chain.mask, tree.mask) and torch.equal(chain.depths(), tree.depths())
    assert torch.equal(chain.ancestors().counted, tree.ancestors().counted)
    ours, theirs = chain.accept(target), tree.accept(target)
    assert torch.equal(ours.path, theirs.path) and torch.equal(ours.accept_lens, theirs.accept_lens)


# A root with children 1 and 2, whose own first children are 3 and 4; the target takes 2, and 4 after it.
BRANCHING = PlainTree(tokens=[1, 2, 3, 3], parents=[0, 0, 1, 2], target=[2, 3, 3, 0, 1])


@instead_of(DraftTree, "of")
def attends_siblings(of: MakeTree, token_ids: torch.Tensor, parents: torch.Tensor, *, num_levels: int) -> DraftTree:
    tree = of(token_ids, parents, num_levels=num_levels)
    causal = torch.ones_like(tree.mask).tril()
    return DraftTree(tree.token_ids, tree.parents, causal, is_chain=False, num_levels=num_levels)


@instead_of(DraftTree, "of")
def looks_one_level_up(of: MakeTree, token_ids: torch.Tensor, parents: torch.Tensor, *, num_levels: int) -> DraftTree:
    return of(token_ids, parents, num_levels=1)


@instead_of(DraftTree, "accept")
def accepts_the_right_without_their_parents(_: object, self: DraftTree, target_ids: torch.Tensor) -> AcceptedPath:
    is_accepted = torch.ones(target_ids.shape, dtype=torch.bool)
    is_accepted[:, 1:] = self.token_ids == target_ids.gather(1, self.parents)
    path = is_accepted.to(torch.int8).sort(dim=1, descending=True, stable=True).indices
    return AcceptedPath(path[:, : self.num_levels + 1], is_accepted.sum(dim=1))


@instead_of(DraftTree, "accept")
def compares_with_the_nodes_own_token(
    accept: Callable[..., AcceptedPath], self: DraftTree, target_ids: torch.Tensor
) -> AcceptedPath:
    """Compares each draft with the target's token at the draft's own node, instead of at its parent."""
    return accept(self, target_ids.roll(1, 1))


@pytest.mark.parametrize(
    ("check", "mutant", "symptom"),
    [
        (assert_nodes_know_their_lines, attends_siblings, "attends another line"),
        (assert_nodes_know_their_lines, looks_one_level_up, "attends another line"),
        (assert_the_walk_is_accepted, attends_siblings, "another path"),
        (assert_the_walk_is_accepted, accepts_the_right_without_their_parents, "another path"),
        (assert_the_walk_is_accepted, compares_with_the_nodes_own_token, "another path"),
    ],
)
def test_it_is_seen(
    check: Callable[[list[PlainTree]], None], mutant: Mutant, symptom: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check([BRANCHING])
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=symptom):
        check([BRANCHING])
