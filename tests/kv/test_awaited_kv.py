"""Tests of which request's KV a prompt waits for, if several requests are computing a common beginning."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from common.kv.kv_shard import OneDevice
from common.kv.layer_group import LayerGroupSpec
from common.kv.pool import CacheKey, KvPool
from common.kv.prefix_tree import PrefixTree
from common.prompts.awaited_kv import awaited_kv


@dataclass(frozen=True)
class Source:
    """A prompt that is computed chunk by chunk. Nothing of it is computed yet."""

    cache_key: CacheKey
    num_kept_tokens: int = 0
    brings_kv: bool = True
    brings_it_in_chunks: bool = True


def key_of(token_ids: Sequence[int]) -> CacheKey:
    return CacheKey(np.array(token_ids), "")


@pytest.mark.parametrize("order", list(itertools.permutations((10, 17, 20, 9))))
def test_a_prompt_waits_for_the_source_that_brings_most(order: Sequence[int]) -> None:
    """A source that brings 10 of the prompt's 40 tokens is enough to wait for; one that brings 9 is not."""
    pool = KvPool(
        groups=[LayerGroupSpec(name="target", num_layers=1, num_planes=2, num_heads=1, head_dim=2, dtype="float32")],
        max_rows=1,
        max_kv_tokens=8,
        max_tokens_per_row=8,
        tensors=OneDevice(torch.device("cpu")),
        prefixes=PrefixTree(lookahead=0),
    )
    prompt = range(40)
    sources = [Source(key_of([*prompt[:num_common], *range(100, 130)])) for num_common in order]
    awaited = awaited_kv(pool, key_of(prompt), sources)
    assert awaited is not None
    assert awaited.num_tokens == 20
    assert awaited.source is sources[order.index(20)]
    assert awaited_kv(pool, key_of(prompt), [sources[order.index(9)]]) is None
