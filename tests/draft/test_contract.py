"""Tests the contract of draft heads in every format: over a paged pool they give the same numbers as plain dense
attention.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.draft.head import DraftHead
from common.draft.load import load_draft as load_by_operators
from common.model.loader import DTYPES
from common.model.target import TargetModel
from tests.draft.cases import BY_NAME, CASES, Case
from tests.draft.conftest import Load
from tests.draft.paged_draft import PagedDraft
from tests.draft.reference import ReferenceHead
from tests.support.loading import load_draft, load_target
from tests.support.models import VOCAB_SIZE

IDS = [(7 * i + 3) % VOCAB_SIZE for i in range(13)]
OTHER_IDS = [(11 * i + 5) % VOCAB_SIZE for i in range(5)]
Saved = Callable[[Case], Path]

QUICK = ("eagle3-midlayer", "eagle3-all-norms", "eagle-plain", "mtp-nextn-three-layers", "mtp-mimo", "mtp-mimo-v2")
every_case = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.name in QUICK else pytest.mark.thorough, id=case.name) for case in CASES],
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Saved:
    made: dict[str, Path] = {}

    def save(case: Case) -> Path:
        if case.name not in made:
            made[case.name] = case.save(tmp_path_factory.mktemp(case.name) / "head", target_dir=target_dir)
        return made[case.name]

    return save


@pytest.fixture(params=["cpu", "torch"])
def load_any(request: pytest.FixtureRequest, target: TargetModel, load: Load) -> Load:
    """A loader of heads with the CPU's kernels, and then one with PyTorch's operators."""
    if request.param == "torch":
        return lambda directory: load_by_operators(directory, target=target, device="cpu", dtype="float32")
    return load


def states(head: DraftHead, num_tokens: int, seed: int = 0) -> Tensor:
    """Returns hidden states [num_tokens, h], fused from random captured states."""
    generator = torch.Generator().manual_seed(seed)
    return head.fuse(torch.randn((num_tokens, head.capture.num_states * 64), generator=generator))


def assert_close(seen: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(seen, expected, atol=2e-5 * max(1.0, float(expected.abs().max())), rtol=0)


def assert_kv(pool: PagedDraft, row: int, layer: int, reference: ReferenceHead) -> None:
    assert_close(pool.kv[layer][:, pool.slots(row, layer)], reference.kv(layer))


@every_case
def test_a_head_says_what_it_needs(case: Case, saved: Saved, load: Load, target: TargetModel) -> None:
    head = load(saved(case))
    assert head.algorithm == case.algorithm
    assert (head.layer_group.name, head.layer_group.num_layers) == ("draft", case.num_layers)
    assert (head.layer_group.num_heads, head.layer_group.head_dim, head.layer_group.dtype) == (2, 16, "float32")
    assert head.capture.num_states == case.num_states
    assert head.capture.final == (case.algorithm != "eagle3")
    assert head.token_ids.tolist() == sorted(set(head.token_ids.tolist()))
    hidden = states(head, 2)
    assert hidden.shape == (2, head.hidden_size)
    logits = head.logits(hidden)
    assert (logits.shape, logits.dtype) == ((2, head.token_ids.numel()), torch.float32)
    assert head.feeds_target_hidden == (case.name == "mtp-mimo-v2")


@every_case
def test_captured_states_are_fused_as_the_format_says(
    case: Case, saved: Saved, load_any: Load, target_dir: Path
) -> None:
    head = load_any(saved(case))
    captured = torch.randn((4, head.capture.num_states * 64), generator=torch.Generator().manual_seed(1))
    assert_close(head.fuse(captured), case.reference(saved(case), target_dir).fuse(captured))


@every_case
def test_outputs_logits_and_kv_equal_dense_attention(
    case: Case, saved: Saved, load_any: Load, target_dir: Path
) -> None:
    """Checks each layer, with two rows at once."""
    head = load_any(saved(case))
    pool = PagedDraft(head)
    references = {row: case.reference(saved(case), target_dir) for row in (1, 2)}
    for layer in range(case.num_layers):
        chunks = {2: (OTHER_IDS, states(head, len(OTHER_IDS), seed=2)), 1: (IDS, states(head, len(IDS)))}
        for row, output in pool.extend(chunks, layer=layer).items():
            expected = references[row].extend(*chunks[row], layer=layer)
            assert_close(output, expected)
            assert_close(head.logits(output, layer=layer), references[row].logits(expected, layer))
            assert_kv(pool, row, layer, references[row])


@every_case
def test_chained_steps_equal_dense_attention(case: Case, saved: Saved, load_any: Load, target_dir: Path) -> None:
    """Runs five steps, each of which reads the output of the one before. With several layers, step i uses layer i."""
    head = load_any(saved(case))
    pool = PagedDraft(head)
    reference = case.reference(saved(case), target_dir)
    hidden = states(head, len(IDS))
    fed, expected = hidden, hidden
    for layer in range(case.num_layers):
        output = pool.extend({1: (IDS, fed)}, layer=layer)[1]
        expected = reference.extend(IDS, expected, layer=layer)
        assert_close(output, expected)
        fed, expected = (hidden, hidden) if head.feeds_target_hidden else (output, expected)
    if case.num_layers == 1:
        last, last_expected = output[-1:], expected[-1]
        for token in OTHER_IDS:
            last = pool.decode({1: (token, last)})[1]
            last_expected = reference.forward(token, last_expected)
            assert_close(last[0], last_expected)
            assert_close(head.logits(last)[0], reference.logits(last_expected))
        assert_kv(pool, 1, 0, reference)


@every_case
def test_chunked_forwards_equal_a_whole_one(case: Case, saved: Saved, load_any: Load) -> None:
    head = load_any(saved(case))
    layer = case.num_layers - 1
    hidden = states(head, len(IDS))
    whole = PagedDraft(head)
    expected = whole.extend({1: (IDS, hidden)}, layer=layer)[1]
    chunked = PagedDraft(head)
    parts = [
        chunked.extend({1: (IDS[start:stop], hidden[start:stop])}, layer=layer)[1]
        for start, stop in ((0, 5), (5, 6), (6, 11))
    ]
    for position in (11, 12):
        parts.append(chunked.decode({1: (IDS[position], hidden[position : position + 1])}, layer=layer)[1])
    assert_close(torch.cat(parts), expected)
    slots = whole.slots(1, layer)
    assert_close(chunked.kv[layer][:, slots], whole.kv[layer][:, slots])


@every_case
def test_kv_is_written_to_the_given_slots_of_the_given_layer_only(case: Case, saved: Saved, load_any: Load) -> None:
    head = load_any(saved(case))
    pool = PagedDraft(head)
    layer = case.num_layers - 1
    hidden = states(head, len(IDS))
    pool.extend({1: (IDS, hidden)}, layer=layer)
    pool.decode({1: (5, hidden[:1])}, layer=layer)
    written = torch.zeros(pool.kv.shape[2], dtype=torch.bool)
    written[pool.slots(1, layer)] = True
    written[0] = True
    for each in range(case.num_layers):
        expected = written if each == layer else torch.arange(written.numel()) == 0
        assert torch.equal(pool.kv[each].isfinite().all(-1).all(-1).all(0), expected)
        assert torch.equal(pool.kv[each].isfinite().any(-1).any(-1).any(0), expected)


@every_case
def test_rows_do_not_see_each_other(case: Case, saved: Saved, load_any: Load) -> None:
    head = load_any(saved(case))
    layer = case.num_layers - 1
    hidden, other = states(head, len(IDS)), states(head, len(OTHER_IDS), seed=2)
    together, alone = PagedDraft(head), PagedDraft(head)
    both = together.extend({1: (IDS, hidden), 2: (OTHER_IDS, other)}, layer=layer)
    assert_close(both[2], alone.extend({2: (OTHER_IDS, other)}, layer=layer)[2])
    both = together.decode({2: (9, other[:1]), 1: (8, hidden[:1])}, layer=layer)
    assert_close(both[2], alone.decode({2: (9, other[:1])}, layer=layer)[2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["eagle3-all-norms", "eagle-plain", "mtp-nextn-own-tables", "mtp-mimo"])
def test_a_head_computes_in_its_targets_dtype(
    name: str, dtype: str, saved: Saved, target_dir: Path, load: Load
) -> None:
    case = BY_NAME[name]
    target = load_target(target_dir, device="cpu", dtype=dtype)
    head = load_draft(saved(case), target=target, device="cpu", dtype=dtype)
    exact = load(saved(case))
    captured = torch.randn((len(IDS), head.capture.num_states * 64), generator=torch.Generator().manual_seed(1))
    output = PagedDraft(head).extend({1: (IDS, head.fuse(captured.to(DTYPES[dtype])))})[1]
    expected = PagedDraft(exact).extend({1: (IDS, exact.fuse(captured))})[1]
    assert (output.dtype, head.layer_group.dtype) == (DTYPES[dtype], dtype)
    logits, wanted = head.logits(output), exact.logits(expected)
    assert logits.dtype == torch.float32
    assert (logits - wanted).abs().max() < 0.1 * wanted.std()
