"""Tests that speculation changes how fast tokens come, never which tokens: greedy output in every mode (invariants I12,
I13), with fused kernels and with PyTorch operators.

Seeded output is in test_speculation_sampled.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from common.draft.head import DraftHead
from common.draft.paged_head import PagedHead
from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from tests.pair import speculation_mutants as mutants
from tests.pair.speculation_mutants import Mutant
from tests.support.draft_heads import save_copy_head
from tests.support.drafted import CHAINS, SAMPLED, SHAPES, Counts, Drafted, assert_same, load_drafted, tokens_per_step
from tests.support.fused import fused
from tests.support.greedy_parity import check_tokens_equal_generate
from tests.support.models import ARCHITECTURES, SMALL_VOCAB_SIZE, save_last_token_model
from tests.support.pair import InProcessPair, MakePair, PairOptions, pairs_that_keep_all

Engines = tuple[tuple[TargetModel, PagedHead | None], ...]
MAX_TOKENS = 4096
"""The most tokens in one forward: enough for all prompts at once."""

MODES = [(mode, overlap, chunk) for mode in ("alone", "crowd") for overlap in (True, False) for chunk in (16, 512)]
OPPOSITES = [(MODES[number], MODES[-1 - number]) for number in range(4)]
"""Pairs of modes in which every setting has opposite values. The four pairs together are all MODES."""
ONE_LAYER = [(head, shape) for head in ("copying", "guessing") for shape in SHAPES]
LAYERS = [*(("copying_layers", shape) for shape in CHAINS), ("guessing_layers", "chain-5")]


def in_opposite_modes(
    forwards: str, heads: Sequence[tuple[str, str]], first: int
) -> list[tuple[str | bool | int, ...]]:
    return [
        (forwards, *drafted, *mode)
        for number, drafted in enumerate(heads, first)
        for mode in OPPOSITES[number % len(OPPOSITES)]
    ]


CASES = [
    *in_opposite_modes("fused", ONE_LAYER, 0),
    *in_opposite_modes("operators", ONE_LAYER, 1),
    *in_opposite_modes("operators", LAYERS, 2),
]
"""Every head and shape of drafts, in two opposite modes each, with fused kernels or with operators. Each of the three
lists covers every value of every setting, and every pair of values.
"""


@pytest.fixture(scope="module")
def fused_engines(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Engines]]:
    """A function that takes the name of a fixture and returns fused copies of its models, one set for each engine."""
    with ExitStack() as stack:

        @cache
        def engines(name: str) -> Engines:
            drafted: Drafted = request.getfixturevalue(name)
            models = load_drafted(drafted.directory, drafted.head_directory, fuses=True)
            return tuple(
                stack.enter_context(fused(models.target, models.head, max_tokens=MAX_TOKENS)) for _ in range(2)
            )

        yield engines


@pytest.mark.parametrize(("forwards", "head", "shape", "mode", "overlap", "chunk_tokens"), CASES)
def test_greedy_tokens_equal_generate(
    forwards: str,
    head: str,
    shape: str,
    mode: str,
    overlap: bool,
    chunk_tokens: int,
    make_pair: MakePair,
    fused_engines: Callable[[str], Engines],
    request: pytest.FixtureRequest,
) -> None:
    drafted: Drafted = request.getfixturevalue(head)
    own = drafted.target, drafted.head
    decode, prefill = fused_engines(head) if forwards == "fused" else (own, own)
    options = PairOptions(overlap=overlap, chunk_tokens=chunk_tokens, **SHAPES[shape])
    pair = make_pair(decode[0], options, draft=decode[1], prefill_model=prefill[0], prefill_draft=prefill[1])
    vocab_size = SMALL_VOCAB_SIZE if head.startswith("copying") else 260
    check_tokens_equal_generate(
        pair,
        drafted.directory,
        crowd=mode == "crowd",
        chunk_tokens=chunk_tokens,
        vocab_size=vocab_size,
        alone_step=3,
    )
    if head.startswith("copying"):
        assert tokens_per_step(pair) > 0.9 * options.spec_info.max_accept_len, "the drafts were not used"
    else:
        assert tokens_per_step(pair) < 1.5, "a random head was believed"


def check_tokens_of_a_leaning_target(leaning: Drafted, shape: str) -> None:
    """The drafts are partly accepted and partly rejected, and the target's tokens depend on the KV of all positions."""
    with pairs_that_keep_all() as make_pair:
        pair = make_pair(leaning.target, PairOptions(chunk_tokens=64, **SHAPES[shape]), draft=leaning.head)
        vocab_size = SMALL_VOCAB_SIZE
        check_tokens_equal_generate(pair, leaning.directory, crowd=True, chunk_tokens=64, vocab_size=vocab_size)
        counts = Counts.of(pair.outcomes.values())
    assert counts.num_accepted > 50 and counts.num_rejected > 50, counts


@pytest.mark.parametrize("target", ["leaning", "leaning_windows"])
@pytest.mark.parametrize("shape", ["chain-4", "tree-4x3-15"])
def test_greedy_tokens_equal_generate_where_some_drafts_are_right(
    shape: str, target: str, request: pytest.FixtureRequest
) -> None:
    check_tokens_of_a_leaning_target(request.getfixturevalue(target), shape)


@pytest.mark.parametrize(
    ("family", "shape", "chunk_tokens"),
    [
        (family, ("chain-4", "tree-4x3-15")[number % 2], (16, 512)[number // 2 % 2])
        for number, family in enumerate(ARCHITECTURES)
    ],
)
def test_greedy_tokens_of_every_family_equal_generate_with_drafts(
    family: str, shape: str, chunk_tokens: int, make_pair: MakePair, tmp_path: Path
) -> None:
    weights = {"context_weight": 0.05, "mlp_weight": 0.05}
    target_dir = save_last_token_model(tmp_path / "target", architecture=family, **weights)
    head_dir = save_copy_head(tmp_path / "head", target_dir=target_dir, family="eagle3")
    drafted = load_drafted(target_dir, head_dir)
    pair = make_pair(drafted.target, PairOptions(chunk_tokens=chunk_tokens, **SHAPES[shape]), draft=drafted.head)
    check_tokens_equal_generate(pair, target_dir, crowd=True, chunk_tokens=chunk_tokens, vocab_size=SMALL_VOCAB_SIZE)
    counts = Counts.of(pair.outcomes.values())
    assert counts.num_accepted > 0 and counts.num_rejected > 0, counts


@pytest.mark.parametrize(
    ("mutant", "shape"),
    [
        (mutants.draft_committed_unverified, "chain-4"),
        (mutants.token_after_a_refused_draft_committed, "chain-4"),
        (mutants.accepted_without_its_parent, "tree-4x3-15"),
        (mutants.kv_of_the_path_not_moved, "tree-4x3-15"),
        (mutants.verify_mask_is_causal, "tree-4x3-15"),
    ],
)
def test_it_is_seen(mutant: Mutant, shape: str, leaning: Drafted, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="prompt"):
        check_tokens_of_a_leaning_target(leaning, shape)


@pytest.mark.parametrize("shape", ["chain-1", "chain-4", "tree-4x3-15"])
@pytest.mark.parametrize("options", SAMPLED)
def test_greedy_output_is_the_same_with_and_without_drafts(
    options: str, shape: str, copying_part: Drafted, make_pair: MakePair
) -> None:
    def run(draft: DraftHead | None) -> InProcessPair:
        pair = make_pair(copying_part.target, PairOptions(**SHAPES[shape]), draft=draft)
        for number in range(12):
            sampling = ResolvedSampling(seed=number, max_tokens=30, temperature=0.0, **SAMPLED[options])
            pair.submit(str(number), [4 + (5 * number + i) % 50 for i in range(3 + 4 * number)], sampling)
        pair.run()
        return pair

    plain, speculating = run(None), run(copying_part.head)
    for name, expected in plain.outcomes.items():
        assert_same(speculating.outcomes[name], expected)
    assert Counts.of(speculating.outcomes.values()).num_accepted > 0


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("shape", ["chain-5", "tree-4x3-15"])
def test_a_request_may_fill_the_context_and_the_pool(
    shape: str, overlap: bool, copying: Drafted, make_pair: MakePair
) -> None:
    """Drafts after the last token have slots of their own, and no step is launched merely to verify them."""
    sizes = PairOptions(overlap=overlap, context_tokens=64, **SHAPES[shape])
    options = replace(sizes, decode_tokens=64 + sizes.spec_info.num_slots - 1)
    for max_tokens in range(20, 32):
        sampling = ResolvedSampling(seed=0, max_tokens=max_tokens, temperature=0.0)
        plain, speculating = make_pair(copying.target, options), make_pair(copying.target, options, draft=copying.head)
        for pair in (plain, speculating):
            pair.submit("full", [4 + i % 50 for i in range(64 - max_tokens)], sampling)
            pair.run()
        assert speculating.outcomes["full"].token_ids == plain.outcomes["full"].token_ids
        assert len(plain.outcomes["full"].token_ids) == max_tokens
        assert speculating.decode.load().num_retractions == 0
        assert len(speculating.decode_steps) <= -(-max_tokens // options.spec_info.max_accept_len) + overlap
