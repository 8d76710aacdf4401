"""Tests that every Triton kernel (attention or sampling) that a request needs was compiled before the first request
came.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.kernel_variants import Variant
from common.attention.backend import AttentionBackend, AttentionPlan, ForwardInput, KernelShape, LayerAttention
from common.attention.torch_attention import TorchAttention
from common.attention.triton_attention import HeadShape, TritonAttention
from common.device.triton_launch import Launch
from common.draft.paged_head import PagedHead
from common.model.gpu_layers import fuse_layers
from common.model.layers_triton import LayerKernels
from common.model.target import TargetModel
from common.sampling.operators import Ancestors, largest
from common.sampling.params import ResolvedSampling
from common.sampling.state import SamplingState
from common.sampling.triton_draws import TritonDraws, draw
from decode_service.speculate.depth import AdaptiveDepth, Depth, FixedDepth
from tests.support.drafted import SAMPLED, SHAPES, Drafted, load_drafted
from tests.support.loading import load_target
from tests.support.pair import InProcessPair, PairOptions
from tests.support.recording_device import RecordingCpuDevice


class _BothPlans(AttentionPlan):
    def __init__(self, noted: AttentionPlan, computed: AttentionPlan) -> None:
        self._noted, self._computed = noted, computed

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        self._noted.attend(layer, query, key, value, how)
        return self._computed.attend(layer, query, key, value, how)


class NotedAttention(AttentionBackend):
    """An attention backend that records the kernel variants which a GPU would compile, and computes with PyTorch's
    operators.
    """

    follows_lengths = True

    def __init__(self, heads: HeadShape, seen: set[Variant]) -> None:
        self._noted = TritonAttention(heads, launch=lambda launch: seen.add(Variant.of(launch)))
        self._computed = TorchAttention()

    def kernel_shapes(self, *, with_masks: bool = False) -> Sequence[KernelShape]:
        return self._noted.kernel_shapes(with_masks=with_masks)

    def plan(self, batch: ForwardInput) -> AttentionPlan:
        return _BothPlans(self._noted.plan(batch), self._computed.plan(batch))


def noted(seen: set[Variant], model: TargetModel | PagedHead, directory: Path, dtype: torch.dtype) -> None:
    """Makes a target or head, loaded from the directory, add to `seen` every attention kernel variant that a GPU would
    compile for it.
    """
    num_heads = json.loads((directory / "config.json").read_text())["num_attention_heads"]
    group = model.layer_group
    model.attention = NotedAttention(HeadShape(num_heads, group.num_heads, group.head_dim, dtype), seen)


class _NoPlan(AttentionPlan):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        return torch.zeros_like(query)


def noted_layers(seen: set[Variant], target: TargetModel) -> None:
    """Records the kernel variants that a GPU would use for the layers. A fused copy of the model only launches them;
    the model itself computes.
    """
    model: Any = target._model
    beside = copy.deepcopy(model)
    is_loading = True

    def launch(launched: Launch) -> None:
        if is_loading:  # one of our layers is being compared with the model's own
            launched.run()
        else:
            seen.add(Variant.of(launched))

    assert fuse_layers(beside, LayerKernels(launch=launch)) == target.num_layers
    is_loading = False

    def note(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        beside(*args, **{**keywords, "attention_plan": _NoPlan()})

    model.register_forward_pre_hook(note, with_kwargs=True)


class NotedDraws(TritonDraws):
    """Kernels that draw tokens. They record the variants which a GPU would compile, and always choose the largest
    logit.

    The choice of token changes no launch, and a real draw in Triton's interpreter would take a hundred times as long.
    """

    def __init__(self, seen: set[Variant]) -> None:
        super().__init__(launch=lambda launch: seen.add(Variant.of(launch)))

    def draw(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        state: SamplingState,
        ancestors: Ancestors | None,
        *,
        is_counted: bool,
    ) -> tuple[Tensor, Tensor]:
        super().draw(logits, rows, positions, state, ancestors, is_counted=is_counted)
        return largest(logits), torch.zeros(logits.shape[0], dtype=torch.bool)

    def propose(
        self, logits: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, state: SamplingState
    ) -> Tensor:
        super().propose(logits, token_ids, rows, positions, state)
        return token_ids[largest(logits)]


def check_nothing_compiles(
    load: Callable[[set[Variant]], tuple[TargetModel, PagedHead | None]], options: PairOptions
) -> None:
    """Asserts that neither service compiles anything while it serves.

    The requests cover every number of rows, prompts shorter and longer than the split size of attention, and all
    sampling options. `load` returns a target and a head that record their kernels; each service gets its own.
    """
    prefill_seen: set[Variant] = set()
    decode_seen: set[Variant] = set()
    prefill, decode = load(prefill_seen), load(decode_seen)
    pair = InProcessPair(
        decode[0],
        new_device=RecordingCpuDevice,
        draft=decode[1],
        prefill_model=prefill[0],
        prefill_draft=prefill[1],
        draw_kernels=NotedDraws(decode_seen),
        prefill_draw_kernels=NotedDraws(prefill_seen),
        options=options,
    )
    try:
        compiled = ({*prefill_seen}, {*decode_seen})
        for number in range(13):
            parts = list(SAMPLED.values())[number % len(SAMPLED)]
            sampling = ResolvedSampling(
                seed=number, max_tokens=3 + number, temperature=0.7 if number % 2 else 0.0, **parts
            )
            pair.submit(str(number), [4 + (5 * number + place) % 50 for place in range(1 + 13 * number)], sampling)
        pair.run()
        assert all(outcome.finished for outcome in pair.outcomes.values())
        assert all(any(each.kernel is draw for each in seen) for seen in compiled), "nothing that draws was noted"
        assert (prefill_seen, decode_seen) == compiled
    finally:
        pair.close()


@pytest.mark.thorough
@pytest.mark.parametrize("replays_forwards", [True, False], ids=["graphs", "no-graphs"])
@pytest.mark.parametrize(
    ("head", "shape", "new_depth"),
    [
        ("leaning", "chain-4", AdaptiveDepth),
        ("leaning", "chain-4", FixedDepth),
        ("leaning", "tree-4x3-15", FixedDepth),
        ("leaning_layers", "chain-4", FixedDepth),
    ],
)
def test_speculation_launches_nothing_that_is_not_compiled(
    head: str, shape: str, new_depth: type[Depth], replays_forwards: bool, request: pytest.FixtureRequest
) -> None:
    kept: Drafted = request.getfixturevalue(head)

    def load(seen: set[Variant]) -> tuple[TargetModel, PagedHead | None]:
        drafted = load_drafted(kept.directory, kept.head_directory)
        noted(seen, drafted.target, drafted.directory, torch.float32)
        noted(seen, drafted.head, drafted.head_directory, torch.float32)
        return drafted.target, drafted.head

    options = {"replays_forwards": replays_forwards, "new_depth": new_depth, **SHAPES[shape]}
    check_nothing_compiles(load, PairOptions(decode_rows=7, **options))


@pytest.mark.parametrize(
    "replays_forwards",
    [pytest.param(True, id="graphs"), pytest.param(False, id="no-graphs", marks=pytest.mark.thorough)],
)
def test_plain_decoding_launches_nothing_that_is_not_compiled(
    replays_forwards: bool, tiny_model_dir: Callable[[str], Path]
) -> None:
    directory = tiny_model_dir("llama")

    def load(seen: set[Variant]) -> tuple[TargetModel, PagedHead | None]:
        target = load_target(directory, device="cpu", dtype="float32", optimizes_modules=False)
        noted(seen, target, directory, torch.float32)
        noted_layers(seen, target)
        return target, None

    check_nothing_compiles(load, PairOptions(decode_rows=7, replays_forwards=replays_forwards))
