"""Tests of what a prefill service checks and compiles before its first prompt comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.attention.backend import ForwardInput, KernelShape
from common.attention.torch_attention import TorchAttention
from common.config.settings import PrefillSettings
from common.errors import StartupError
from common.model.target import TargetModel
from prefill_service.main import check_chunks
from tests.support.engines import new_prefill_engine
from tests.support.faulty_target import FaultyTarget
from tests.support.scripted_device import ScriptedDevice

SHAPES = (KernelShape(3, 3), KernelShape(2, 40))


class CompilingAttention(TorchAttention):
    """An AttentionBackend with kernels for each of SHAPES."""

    def kernel_shapes(self, *, with_masks: bool = False) -> Sequence[KernelShape]:
        return SHAPES


def test_each_shape_runs_over_what_is_nobodys(tiny_target: Callable[[str], TargetModel]) -> None:
    seen: list[ForwardInput] = []
    target = FaultyTarget(tiny_target("llama"))
    target.attention = CompilingAttention()
    target.fails = lambda batch: bool(seen.append(batch))  # type: ignore[func-returns-value]
    engine = new_prefill_engine(target, ScriptedDevice(), max_rows=2)
    assert [(batch.extend_lens, batch.max_seq_len) for batch in seen] == [((3,), 3), ((2,), 40)]
    for batch in seen:
        assert not batch.req_pool_indices.any() and not batch.out_cache_loc.any()
        assert torch.isfinite(batch.kv).all() and not batch.kv[:, :, 1:].any()
    assert engine.load().rows.free == 2
    engine.close()


def test_chunks_smaller_than_the_heads_layers_are_refused_by_name() -> None:
    head: Any = SimpleNamespace(layer_group=SimpleNamespace(num_layers=4))
    check_chunks(PrefillSettings(chunk_tokens=4), head)
    check_chunks(PrefillSettings(chunk_tokens=1), None)
    with pytest.raises(StartupError, match=r"^chunk_tokens: 3, but the draft head has 4 layers"):
        check_chunks(PrefillSettings(chunk_tokens=3), head)
