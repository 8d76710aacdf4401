"""A draft head's fused steps compute the same as its own layers, and leave the same KV in the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import structlog
import torch
from structlog.testing import capture_logs
from torch import Tensor

from baton_cpu.program import eagle3_head
from baton_cpu.program.comparison import relative
from baton_cpu.program.fusing import fuse
from common.attention.backend import ForwardInput
from common.draft.head import DraftOutput
from common.draft.load import load_draft
from common.draft.paged_head import PagedHead
from common.model.loader import load_target
from common.model.target import TargetModel
from tests.draft.cases import BY_NAME
from tests.support.draft_heads import save_eagle1_head, save_eagle3_head
from tests.support.models import save_tiny_model

_NUM_SLOTS, _NUM_TOKENS = 96, 48
_WRITTEN = ["midlayer", "speculators", "norm-before-fc", "norm-output", "norm-before-residual", "narrow", "wide"]
_WRITTEN += ["full-vocabulary", "tied-lm-head", "qkv-bias"]
_IN_BFLOAT16 = ["midlayer", "norm-before-fc", "norm-output"]
"""Styles of heads that are also tested in bfloat16. Each feeds a different input into a layer without a norm."""
New = Callable[..., tuple[TargetModel, PagedHead]]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Uses one thread: with heads this small, a second thread would cost far more time than the computation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of six layers. A head reads the states of its layers 2, 3 and 3 by default (2, n // 2 and n - 3)."""
    return save_tiny_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> TargetModel:
    return load_target(target_dir, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def new(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> New:
    def make(case: str, dtype: str = "float32") -> tuple[TargetModel, PagedHead]:
        directory = BY_NAME[f"eagle3-{case}"].save(tmp_path_factory.mktemp(case) / "head", target_dir=target_dir)
        target = load_target(target_dir, device="cpu", dtype=dtype, fuses=True)
        return target, load_draft(directory, target=target, device="cpu", dtype=dtype, fuses=True)

    return make


@pytest.fixture(
    scope="module",
    params=[*((case, "float32") for case in _WRITTEN), *((case, "bfloat16") for case in _IN_BFLOAT16)],
    ids="-".join,
)
def head(request: pytest.FixtureRequest, new: New) -> Iterator[PagedHead]:
    target, head = new(*request.param)
    fuse(target, head, num_threads=2, max_tokens=_NUM_SLOTS)
    assert head.runs_program and head.new_programs is None
    yield head
    assert target._program is not None and target._program.close(5.0), "a thread of the team did not end"


def _dtype(head: PagedHead) -> torch.dtype:
    return getattr(torch, head.layer_group.dtype)  # type: ignore[no-any-return]


def _batch(head: PagedHead, *, prefix_lens: list[int], num_new: list[int]) -> ForwardInput:
    """Returns the input of a forward over rows in random slots. Row i has `prefix_lens[i]` earlier tokens and
    `num_new[i]` new ones, and the forward computes logits for its last token.
    """
    generator = torch.Generator().manual_seed(sum(prefix_lens) + 7 * sum(num_new))
    group = head.layer_group
    kv = torch.randn((1, 2, _NUM_SLOTS, group.num_heads, group.head_dim), generator=generator).to(_dtype(head))
    slots = torch.randperm(_NUM_SLOTS - 1, generator=generator) + 1
    tables = torch.zeros((len(num_new) + 1, _NUM_TOKENS), dtype=torch.int64)
    seq_lens = [before + new for before, new in zip(prefix_lens, num_new, strict=True)]
    for row, (length, start) in enumerate(zip(seq_lens, np.cumsum([0, *seq_lens]).tolist(), strict=False)):
        tables[row + 1, :length] = slots[start : start + length]
    window = [(row, t) for row, new in enumerate(num_new) for t in range(seq_lens[row] - new, seq_lens[row])]
    is_decode = set(num_new) == {1}
    return ForwardInput(
        input_ids=torch.randint(0, 64, (len(window),), generator=generator),
        positions=torch.tensor([t for _, t in window]),
        out_cache_loc=torch.stack([tables[row + 1, t] for row, t in window]),
        req_to_token=tables,
        req_pool_indices=torch.arange(1, len(num_new) + 1),
        seq_lens=torch.tensor(seq_lens),
        prefix_lens=None if is_decode else tuple(prefix_lens),
        extend_lens=None if is_decode else tuple(num_new),
        max_seq_len=max(seq_lens),
        kv=kv,
        logits_rows=torch.tensor(num_new).cumsum(0) - 1,
    )


def _captured(head: PagedHead, num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn((num_tokens, head.capture.num_states * 64), generator=generator).to(_dtype(head))


@pytest.mark.parametrize(
    ("prefix_lens", "num_new"),
    [([6], [5]), ([0, 9, 3], [3, 1, 12]), ([2], [40]), ([2, 0], [40, 40])],
    ids=["a step's tokens", "rows left behind by different lengths", "a row far behind", "chunks of prompts"],
)
def test_an_extend_is_the_heads(head: PagedHead, prefix_lens: list[int], num_new: list[int]) -> None:
    batch = _batch(head, prefix_lens=prefix_lens, num_new=num_new)
    _assert_same(head, batch, lambda batch: head.extend(batch, _captured(head, sum(num_new))))


def test_steps_on_its_own_outputs_are_the_heads(head: PagedHead) -> None:
    """After an extend, three steps of a chain each read the output of the one before."""

    def chain(batch: ForwardInput) -> DraftOutput:
        output = head.extend(batch, _captured(head, 3))
        for length in (8, 9, 10):
            output = head.step(
                replace(
                    batch,
                    input_ids=torch.tensor([length]),
                    positions=torch.tensor([length]),
                    out_cache_loc=torch.tensor([60 - length]),
                    req_to_token=batch.req_to_token.index_fill(1, torch.tensor([length]), 60 - length),
                    seq_lens=torch.tensor([length + 1]),
                    prefix_lens=None,
                    extend_lens=None,
                    max_seq_len=length + 1,
                    logits_rows=None,
                ),
                output.hidden,
            )
        return output

    _assert_same(head, _batch(head, prefix_lens=[5], num_new=[3]), chain)


def test_a_tree_attends_as_its_mask_says(head: PagedHead) -> None:
    batch = _batch(head, prefix_lens=[5, 2], num_new=[3, 3])
    mask = torch.eye(3, dtype=torch.bool).repeat(2, 1)
    beams = replace(batch, positions=torch.tensor([5, 5, 5, 2, 2, 2]), tree_mask=mask, logits_rows=None)
    hidden = torch.randn((6, head.hidden_size), generator=torch.Generator().manual_seed(3)).to(_dtype(head))
    _assert_same(head, beams, lambda batch: head.step(batch, hidden))


def test_no_logits_are_wanted_where_nothing_is_drafted(head: PagedHead) -> None:
    batch = _batch(head, prefix_lens=[6], num_new=[5])
    output = head.extend(replace(batch, logits_rows=torch.zeros(0, dtype=torch.int64)), _captured(head, 5))
    assert output.logits.shape[0] == output.hidden.shape[0] == 0


def test_what_the_target_captured_is_left_as_it_is(head: PagedHead) -> None:
    captured = _captured(head, 5)
    before = captured.clone()
    head.extend(_batch(head, prefix_lens=[6], num_new=[5]), captured)
    assert torch.equal(captured, before)


def test_a_program_that_computes_something_else_is_not_used(new: New) -> None:
    """The head's program computes something else than its layers. The target's program, which is right, is still
    used.
    """
    target, head = new("midlayer")
    assert head.new_programs is not None
    programs = head.new_programs(lambda: None)
    programs.step.program.numbers[:] *= 1.5
    head.new_programs = lambda check: programs
    fuse(target, head, num_threads=2, max_tokens=_NUM_SLOTS)
    assert not head.runs_program and head.new_programs is None
    assert target._program is not None and target._program.close(5.0)


def test_heads_that_are_not_written_down_run_by_operators(
    target: TargetModel, target_dir: Path, tmp_path: Path
) -> None:
    directories = [
        save_eagle3_head(tmp_path / "fc-norm", target_dir=target_dir, fc_norm=True),
        save_eagle3_head(tmp_path / "no-head", target_dir=target_dir, draft_vocab_size=None, own_lm_head=False),
        save_eagle1_head(tmp_path / "eagle-1", target_dir=target_dir),
    ]
    for directory in directories:
        assert load_draft(directory, target=target, device="cpu", dtype="float32", fuses=True).new_programs is None


def test_a_head_is_loaded_where_there_is_no_room_for_its_programs(
    target: TargetModel, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_eagle3_head(tmp_path / "head", target_dir=target_dir)
    monkeypatch.setattr("common.host.memory.available_bytes", lambda: 0)
    head = load_draft(directory, target=target, device="cpu", dtype="float32", fuses=True)
    assert head.new_programs is not None
    with pytest.raises(OSError, match="are available"):
        head.new_programs(lambda: None)


def test_where_there_is_room_for_the_target_alone_the_head_runs_by_operators(
    new: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = new("midlayer")

    def no_room(num_bytes: int) -> None:
        raise OSError(f"no room for {num_bytes} bytes")

    monkeypatch.setattr(eagle3_head, "require_room", no_room)
    with capture_logs() as logs:
        fuse(target, head, num_threads=2, max_tokens=_NUM_SLOTS, log=structlog.get_logger())
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["fused_draft_head_failed"]
    assert not head.runs_program and head.new_programs is None
    assert target._program is not None and target._program.close(5.0)


def test_nothing_is_written_down_where_it_is_switched_off(
    target: TargetModel, target_dir: Path, tmp_path: Path
) -> None:
    directory = save_eagle3_head(tmp_path / "head", target_dir=target_dir)
    assert load_draft(directory, target=target, device="cpu", dtype="float32").new_programs is None


def _assert_same(head: PagedHead, batch: ForwardInput, compute: Callable[[ForwardInput], DraftOutput]) -> None:
    program = head._program
    assert program is not None and program.takes(batch)
    mine = replace(batch, kv=batch.kv.clone())
    seen = compute(mine)
    head._program = None
    try:
        expected = compute(batch)
    finally:
        head.run_program(program)
    for own, wanted in ((seen.hidden, expected.hidden), (seen.logits, expected.logits), (mine.kv, batch.kv)):
        if batch.kv.dtype == torch.float32:
            torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)
        else:
            assert own.dtype == wanted.dtype and relative(own, wanted) < 0.03
