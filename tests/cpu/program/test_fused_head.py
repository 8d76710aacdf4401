"""A draft head's fused steps compute the same as its own layers, and leave the same KV in the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

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
from common.draft.paged_head import PagedHead
from common.model.target import TargetModel
from tests.cpu.program.batches import scattered_batch
from tests.draft.cases import BY_NAME
from tests.support.draft_heads import save_eagle1_head, save_eagle3_head
from tests.support.loading import load_draft, load_target

_MAX_TOKENS = 96
_WRITTEN = ["midlayer", "speculators", "norm-before-fc", "norm-output", "norm-before-residual", "narrow", "wide"]
_WRITTEN += ["full-vocabulary", "tied-lm-head", "qkv-bias"]
_IN_BFLOAT16 = ["midlayer", "norm-before-fc", "norm-output"]
"""Styles of heads that are also tested in bfloat16. Each feeds a different input into a layer without a norm."""
New = Callable[..., tuple[TargetModel, PagedHead]]


@pytest.fixture(scope="module")
def new(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> New:
    def make(case: str, dtype: str = "float32") -> tuple[TargetModel, PagedHead]:
        directory = BY_NAME[f"eagle3-{case}"].save(tmp_path_factory.mktemp(case) / "head", target_dir=target_dir)
        target = load_target(target_dir, device="cpu", dtype=dtype, fuses=True)
        return target, load_draft(directory, target=target, device="cpu", dtype=dtype, fuses=True)

    return make


@pytest.fixture(
    scope="module",
    params=[
        *((case, "float32") for case in _WRITTEN),
        *(pytest.param((case, "bfloat16"), marks=pytest.mark.thorough) for case in _IN_BFLOAT16),
    ],
    ids="-".join,
)
def head(request: pytest.FixtureRequest, new: New) -> Iterator[PagedHead]:
    target, head = new(*request.param)
    fuse(target, head, num_threads=2, max_tokens=_MAX_TOKENS)
    assert head.runs_program and head.new_programs is None
    yield head
    assert target._program is not None and target._program.close(5.0), "a thread of the team did not end"


def _dtype(head: PagedHead) -> torch.dtype:
    return getattr(torch, head.layer_group.dtype)  # type: ignore[no-any-return]


def _batch(head: PagedHead, rows: list[tuple[int, int]]) -> ForwardInput:
    return scattered_batch(head.layer_group, rows, vocab_size=64, asks_for_last=True)


def _captured(head: PagedHead, num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn((num_tokens, head.capture.num_states * 64), generator=generator).to(_dtype(head))


@pytest.mark.parametrize(
    "rows",
    [[(6, 5)], [(0, 3), (9, 1), (3, 12)], [(2, 40)], [(2, 40), (0, 40)]],
    ids=["a step's tokens", "rows left behind by different lengths", "a row far behind", "chunks of prompts"],
)
def test_an_extend_is_the_heads(head: PagedHead, rows: list[tuple[int, int]]) -> None:
    num_new = sum(new for _, new in rows)
    _assert_same(head, _batch(head, rows), lambda batch: head.extend(batch, _captured(head, num_new)))


def test_steps_on_its_own_outputs_are_the_heads(head: PagedHead) -> None:
    """After an extend, three steps of a chain each read the output of the one before."""

    def chain(batch: ForwardInput) -> DraftOutput:
        output = head.extend(batch, _captured(head, 3))
        free = batch.kv.shape[2] - 1 - torch.arange(3)
        for length in (8, 9, 10):
            output = head.step(
                replace(
                    batch,
                    input_ids=torch.tensor([length]),
                    positions=torch.tensor([length]),
                    out_cache_loc=free[length - 8 :][:1],
                    req_to_token=batch.req_to_token.index_copy(
                        1, torch.tensor([length]), free[length - 8].repeat(2, 1)
                    ),
                    seq_lens=torch.tensor([length + 1]),
                    prefix_lens=None,
                    extend_lens=None,
                    max_seq_len=length + 1,
                    logits_rows=None,
                ),
                output.hidden,
            )
        return output

    _assert_same(head, _batch(head, [(5, 3)]), chain)


def test_a_tree_attends_as_its_mask_says(head: PagedHead) -> None:
    batch = _batch(head, [(5, 3), (2, 3)])
    mask = torch.eye(3, dtype=torch.bool).repeat(2, 1)
    beams = replace(batch, positions=torch.tensor([5, 5, 5, 2, 2, 2]), tree_mask=mask, logits_rows=None)
    hidden = torch.randn((6, head.hidden_size), generator=torch.Generator().manual_seed(3)).to(_dtype(head))
    _assert_same(head, beams, lambda batch: head.step(batch, hidden))


def test_no_logits_are_wanted_where_nothing_is_drafted(head: PagedHead) -> None:
    batch = _batch(head, [(6, 5)])
    output = head.extend(replace(batch, logits_rows=torch.zeros(0, dtype=torch.int64)), _captured(head, 5))
    assert output.logits.shape[0] == output.hidden.shape[0] == 0


def test_what_the_target_captured_is_left_as_it_is(head: PagedHead) -> None:
    captured = _captured(head, 5)
    before = captured.clone()
    head.extend(_batch(head, [(6, 5)]), captured)
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
    fuse(target, head, num_threads=2, max_tokens=_MAX_TOKENS)
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
        fuse(target, head, num_threads=2, max_tokens=_MAX_TOKENS, log=structlog.get_logger())
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
