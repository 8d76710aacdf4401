"""Fused forwards compute the same as the model's own layers for any batch, and leave the same KV in the pool."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from baton_cpu.program.builder import FusedDecoder, with_capture
from baton_cpu.program.comparison import difference
from baton_cpu.program.fusing import fuse, new_forwards
from baton_cpu.program.kernel.attending import PART_TOKENS
from common.attention.backend import ForwardInput
from common.errors import StartupError
from common.model.capture import HiddenCapture
from common.model.forward_program import ForwardProgram, ProgramOutput
from common.model.target import TargetModel
from common.service.work_beside import Stopped
from tests.cpu.program.batches import scattered_batch
from tests.support.loading import load_target
from tests.support.models import save_tiny_model

_MAX_TOKENS = 512
MODELS = [
    *("llama", "mixtral"),
    *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen2", "qwen3", "mistral", "qwen3_moe", "olmoe")),
]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tiny_model_dir) -> TargetModel:  # type: ignore[no-untyped-def]
    return load_target(tiny_model_dir(request.param), device="cpu", dtype="float32", fuses=True)


@pytest.fixture(scope="module")
def program(model: TargetModel) -> Iterator[ForwardProgram]:
    model.capture_hidden(HiddenCapture(layers=(0, model.num_layers), final=True))
    new_decoder = model.new_decoder
    fuse(model, num_threads=2, max_tokens=_MAX_TOKENS)
    assert model._program is not None and model.new_decoder is None
    model.new_decoder = new_decoder  # for tests that build the program once more
    yield model._program
    assert model._program.close(5.0), "a thread of the team did not end"


def _batch(model: TargetModel, *rows: tuple[int, int], tree: bool = False) -> ForwardInput:
    """Returns a batch of rows, given as (earlier tokens, new tokens). With `tree` the new tokens are a draft tree."""
    num_new, mask = rows[0][1], None
    if tree:
        mask = torch.rand((len(rows) * num_new, num_new), generator=torch.Generator().manual_seed(num_new)) > 0.5
        mask |= torch.eye(num_new, dtype=torch.bool).repeat(len(rows), 1)
    return scattered_batch(model.layer_group, rows, vocab_size=model.vocab_size, mask=mask)


_SHAPES = {
    "one row": [(6, 1)],
    "three rows": [(6, 1), (0, 1), (11, 1)],
    "more rows than the kernel takes at once": [(1 + place % 5, 1) for place in range(10)],
    "a chunk": [(0, 17)],
    "rows of several lengths": [(4, 3), (0, 1), (9, 5)],
    "rows of several parts": [(150, 1), (3, 1), (PART_TOKENS, 1), (PART_TOKENS - 1, 1)],
    "few tokens over two parts": [(PART_TOKENS - 3, 8), (2 * PART_TOKENS - 8, 8), (10, 8)],
    "more tokens over two parts": [(PART_TOKENS - 5, 20)],
}
_TREES = {
    "a tree": [(5, 4), (2, 4)],
    "a tree over two parts": [(PART_TOKENS - 3, 6), (2 * PART_TOKENS - 1, 6)],
}


@pytest.mark.parametrize("shape", [*_SHAPES, *_TREES])
def test_logits_states_and_kv_are_the_models(model: TargetModel, program: ForwardProgram, shape: str) -> None:
    is_tree = shape in _TREES
    _assert_same(model, program, _batch(model, *(_TREES if is_tree else _SHAPES)[shape], tree=is_tree))


@pytest.mark.parametrize("num_new", [1, 5])
def test_what_a_request_computes_depends_on_no_other(model: TargetModel, program: ForwardProgram, num_new: int) -> None:
    """The results are equal to the last bit, although threads share the parts of a request that is alone, and take
    whole requests when there are several.
    """
    crowd = _batch(model, *((before, num_new) for before in (170, 20, 3, 64, 1, 2, 3, 4, 5, 6)))
    alone = replace(
        crowd,
        input_ids=crowd.input_ids[:num_new],
        positions=crowd.positions[:num_new],
        out_cache_loc=crowd.out_cache_loc[:num_new],
        req_pool_indices=crowd.req_pool_indices[:1],
        seq_lens=crowd.seq_lens[:1],
        prefix_lens=None if crowd.prefix_lens is None else crowd.prefix_lens[:1],
        extend_lens=None if crowd.extend_lens is None else crowd.extend_lens[:1],
        kv=crowd.kv.clone(),
    )
    for _ in range(3):
        assert torch.equal(program.forward(alone).logits, program.forward(crowd).logits[:num_new])


def test_a_forward_is_prepared_while_an_earlier_one_is_to_come(model: TargetModel, program: ForwardProgram) -> None:
    """Two forwards are prepared before either runs. The later one needs more memory, which must not be taken from the
    earlier one, and its tokens are not known yet.
    """
    small = _batch(model, (6, 1))
    large = _batch(model, (4, 3), (1, 1), (2, 2), (0, 9), (5, 4))
    known = (small, large)
    batches = [replace(batch, kv=batch.kv.clone(), input_ids=torch.zeros_like(batch.input_ids)) for batch in known]
    expected = [program.forward(replace(batch, kv=batch.kv.clone())) for batch in known]
    fresh = new_forwards([with_capture(_decoder(model), model.capture)], num_threads=2, max_tokens=_MAX_TOKENS)[0]
    try:
        computes = [fresh.prepare(batch) for batch in batches]
        dropped = [fresh.prepare(replace(large, kv=large.kv.clone())) for _ in range(3)]
        del dropped
        gc.collect()
        overwritten = [np.full(1 << size, 255, np.uint8) for size in range(8, 22)]
        for batch, given in zip(batches, known, strict=True):
            batch.input_ids.copy_(given.input_ids)
        outputs = [compute() for compute in computes]
    finally:
        assert fresh.close(5.0)
    del overwritten
    for output, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(output.logits, wanted.logits)


def test_threads_prepare_one_after_the_other(model: TargetModel, program: ForwardProgram) -> None:
    """The engine thread prepares a step while the forward stream prepares a prompt. A program may replace its buffers
    meanwhile, so one of the two has to wait.
    """
    together = threading.Barrier(2)
    was_alone: list[bool] = []

    class Noted(ForwardProgram):
        def takes(self, batch: ForwardInput) -> bool:
            return True

        def prepare(self, batch: ForwardInput, *_: object, **__: object) -> Callable[[], ProgramOutput]:
            try:
                together.wait(0.2)
            except threading.BrokenBarrierError:
                was_alone.append(True)
            else:
                was_alone.append(False)
            return lambda: program.forward(batch)

    batch = _batch(model, (6, 1))
    num_before = model.forward_counts.num_fused
    model.run_program(Noted())
    try:
        threads = [threading.Thread(target=model.prepare, args=(batch,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        model.run_program(program)
    assert was_alone == [True, True]
    assert model.forward_counts.num_fused == num_before + 2


def test_only_the_logits_that_are_wanted_are_computed(model: TargetModel, program: ForwardProgram) -> None:
    batch = _batch(model, (4, 3), (0, 1), (9, 5))
    every, *_ = program.forward(batch)
    logits, *_ = program.forward(replace(batch, logits_rows=torch.tensor([2, 8])))
    assert torch.equal(logits, every[[2, 8]])


def test_logits_that_are_no_numbers_are_told(model: TargetModel, program: ForwardProgram) -> None:
    batch = _batch(model, (6, 1), (3, 1))
    batch.kv[:, :, batch.req_to_token[batch.req_pool_indices[1], :3]] = float("nan")
    *_, largest = program.forward(batch)
    assert largest is not None and largest.are_not_finite.tolist() == [False, True]


def test_the_models_forwards_are_the_programs_and_show_progress_layer_by_layer(
    model: TargetModel, program: ForwardProgram
) -> None:
    batch = _batch(model, (6, 1), (3, 1))
    expected, *_ = program.forward(replace(batch, kv=batch.kv.clone()))
    before, of_model = program.num_layers_begun, model.num_layers_begun
    assert torch.equal(model.forward(batch).logits, expected)
    assert program.num_layers_begun == before + model.num_layers
    assert model.num_layers_begun == of_model + model.num_layers
    of_model_alone = model.num_layers_begun - program.num_layers_begun
    difference(model, program)
    assert model.num_layers_begun - program.num_layers_begun == of_model_alone, "comparing the two is no progress"


def test_a_program_that_cannot_be_made_leaves_no_thread(model: TargetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = _decoder(model)
    monkeypatch.setattr("baton_cpu.program.forward.MAX_BUFFERS", 0)
    before = set(threading.enumerate())
    with pytest.raises(AssertionError):
        new_forwards([decoder], num_threads=2, max_tokens=1)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_a_program_that_computes_something_else_is_not_used(architecture: str, tiny_model_dir) -> None:  # type: ignore[no-untyped-def]
    model = load_target(tiny_model_dir(architecture), device="cpu", dtype="float32", fuses=True)
    decoder = _decoder(model)
    decoder.program.numbers[:] *= 1.5
    model.new_decoder = lambda check: decoder
    before = threading.enumerate()
    with pytest.raises(StartupError, match="differ from the model's"):
        fuse(model, num_threads=2, max_tokens=_MAX_TOKENS)
    assert model._program is None
    assert not [thread for thread in threading.enumerate() if thread.name == "forward-1" and thread not in before]


def test_experts_beside_plain_layers_are_fused_too(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, "qwen3_moe", mlp_only_layers=[0], norm_topk_prob=True, num_hidden_layers=3)
    model = load_target(directory, device="cpu", dtype="float32", fuses=True)
    assert fuse(model, num_threads=2, max_tokens=_MAX_TOKENS) < 1e-4
    assert model._program is not None and model._program.close(5.0)


@pytest.mark.thorough
def test_experts_with_other_weights_are_not_used_in_bfloat16(tmp_path: Path) -> None:
    """The two models differ only in whether the weights of a token's experts are divided by their sum."""
    model, other = (
        load_target(
            save_tiny_model(tmp_path / str(adds_up), "qwen3_moe", num_experts_per_tok=4, norm_topk_prob=adds_up),
            device="cpu",
            dtype="bfloat16",
            fuses=True,
        )
        for adds_up in (True, False)
    )
    model.new_decoder = other.new_decoder
    with pytest.raises(StartupError, match="differ from the model's"):
        fuse(model, num_threads=2, max_tokens=_MAX_TOKENS)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.thorough) for name in ("mixtral", "qwen3_moe", "olmoe")],
)
def experts_in_bfloat16(request: pytest.FixtureRequest, tiny_model_dir) -> Iterator[TargetModel]:  # type: ignore[no-untyped-def]
    model = load_target(tiny_model_dir(request.param), device="cpu", dtype="bfloat16", fuses=True)
    # A token that rounding gives another expert moves the median of those that attend to it: 0.024 with AVX2.
    assert fuse(model, num_threads=2, max_tokens=_MAX_TOKENS) < 0.03
    assert model._program is not None
    yield model
    assert model._program.close(5.0)


@pytest.mark.parametrize("num_new", [1, 5, 20, 40])
def test_one_kind_of_forward_that_differs_is_told(experts_in_bfloat16: TargetModel, num_new: int) -> None:
    """A step has few of the tokens that are compared. Its difference counts all the same."""
    program = experts_in_bfloat16._program
    assert program is not None

    class Scaled(ForwardProgram):
        def forward(self, batch: ForwardInput, *_: object, **__: object) -> ProgramOutput:
            output = program.forward(batch)
            return output._replace(logits=output.logits * (1.5 if len(batch.input_ids) == 2 * num_new else 1.0))

    assert difference(experts_in_bfloat16, Scaled()) == pytest.approx(0.5, abs=0.02)


def test_one_token_without_numbers_is_told(experts_in_bfloat16: TargetModel) -> None:
    program = experts_in_bfloat16._program
    assert program is not None

    class Broken(ForwardProgram):
        def forward(self, batch: ForwardInput, *_: object, **__: object) -> ProgramOutput:
            output = program.forward(batch)
            batch.kv[-1, :, batch.out_cache_loc[0]] = float("inf")
            return output

    assert difference(experts_in_bfloat16, Broken()) == float("inf")


def test_no_rows_are_no_work(model: TargetModel, program: ForwardProgram) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    batch = _batch(model, (6, 1))
    nothing = replace(
        batch,
        input_ids=empty,
        positions=empty,
        out_cache_loc=empty,
        req_pool_indices=empty,
        seq_lens=empty,
        max_seq_len=0,
    )
    kv = batch.kv.clone()
    logits, *_ = program.forward(nothing)
    assert logits.shape == (0, model.vocab_size) and torch.equal(batch.kv, kv)


def test_forwards_past_the_rotation_table_are_the_models_own(model: TargetModel, program: ForwardProgram) -> None:
    batch = _batch(model, (6, 1))
    assert program.takes(batch)
    assert not program.takes(replace(batch, max_seq_len=_decoder(model).cosines.shape[0] + 1))
    many = torch.zeros(_MAX_TOKENS + 1, dtype=torch.int64)
    assert not program.takes(replace(batch, input_ids=many))


@pytest.mark.parametrize("architecture", ["phi3", "mistral, windows", "qwen2, a window"])
def test_a_model_of_another_kind_has_no_program(architecture: str, tiny_model_dir) -> None:  # type: ignore[no-untyped-def]
    target = load_target(tiny_model_dir(architecture), device="cpu", dtype="float32", fuses=True)
    assert target.new_decoder is None


def test_it_is_written_down_when_asked_from_the_weights_there_were(tiny_model_dir) -> None:  # type: ignore[no-untyped-def]
    """The program is built from the original weights, even if the model's modules were replaced by ones that store them
    differently.
    """
    directory = tiny_model_dir("llama")
    kept, changed = (
        load_target(directory, device="cpu", dtype="float32", fuses=True, optimizes_modules=is_changed)
        for is_changed in (False, True)
    )
    assert set(map(type, changed._model.modules())) != set(map(type, kept._model.modules()))
    expected, seen = _decoder(kept), _decoder(changed)
    assert all(map(torch.equal, seen.program.kept, expected.program.kept)) and len(seen.program.kept) > 10
    assert torch.equal(seen.cosines, expected.cosines)


def test_writing_it_down_can_be_stopped_between_layers(model: TargetModel) -> None:
    begun: list[int] = []

    def stop() -> None:
        begun.append(len(begun))
        if len(begun) >= 2:
            raise Stopped

    assert model.new_decoder is not None
    with pytest.raises(Stopped):
        model.new_decoder(stop)
    assert len(begun) == 3  # and once when the layers were to have weights of their own again
    assert model.new_decoder(lambda: None).program.operations.size


def _decoder(model: TargetModel) -> FusedDecoder:
    assert model.new_decoder is not None
    return model.new_decoder(lambda: None)


def _assert_same(model: TargetModel, program: ForwardProgram, batch: ForwardInput) -> None:
    mine = replace(batch, kv=batch.kv.clone())
    logits, states, largest = program.forward(mine)
    assert largest is not None and torch.equal(largest.token_ids, logits.argmax(dim=-1))
    assert not largest.are_not_finite.any()
    model._program = None
    try:
        expected = model.forward(batch)
    finally:
        model.run_program(program)
    assert expected.hidden is not None and states is not None
    torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, expected.hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine.kv, batch.kv, rtol=1e-4, atol=1e-4)
