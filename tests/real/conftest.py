"""SmolLM2, and `generate`'s output for the parity prompts, computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.checkpoints.demo_model import ensure_demo_model
from common.checkpoints.source import resolve_draft
from common.rpc.grpc_options import MAX_SEGMENT_BYTES
from tests.parity.prompts import PROMPTS
from tests.parity.reference import MAX_TIES_PER_TOKEN, Reference
from tests.support.drafted import Drafted, load_drafted

NEW_TOKENS = 24
MAX_TOKENS = 512
"""The most tokens of a forward in a pair within one process."""
ONE_THREAD = ("--num-threads=1",)
"""The argument that gives a service one thread. The other core belongs to the other test process, and threads that wait
for each other need a core each.
"""
Prompts = list[tuple[str, list[int]]]
_LEFT_TO_PARITY = {"long_log", "long_module", "long_tale"}
"""Long prompts that `make parity` serves in all its configurations. Here one long prompt is enough."""
SIZES: dict[str, Any] = {
    "chunk_tokens": 64,
    "max_batch_tokens": 512,
    "context_tokens": 2048,
    "prefill_tokens": 8192,
    "decode_tokens": 12288,
    "max_segment_bytes": MAX_SEGMENT_BYTES,
    "send_budget_bytes": 32 << 20,
    "receive_budget_bytes": 32 << 20,
}


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return ensure_demo_model()


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir, new_tokens=NEW_TOKENS)


@pytest.fixture(scope="session")
def prompts(reference: Reference) -> Prompts:
    return [(prompt.name, reference.prompt_ids(prompt)) for prompt in PROMPTS if prompt.name not in _LEFT_TO_PARITY]


@pytest.fixture(scope="session")
def drafted(model_dir: Path) -> Drafted:
    return load_drafted(model_dir, resolve_draft("demo"), fuses=True)


def check(reference: Reference, prompts: Prompts, outputs: dict[str, list[int]]) -> None:
    reference.compute([ids for _, ids in prompts])
    found = [reference.compare(name, ids, outputs[name]) for name, ids in prompts]
    divergences = [divergence for divergence in found if divergence is not None]
    num_tokens = sum(len(tokens) for tokens in outputs.values())
    for divergence in divergences:
        print(divergence)
    assert all(divergence.is_tie for divergence in divergences)
    assert len(divergences) <= max(1, num_tokens * MAX_TIES_PER_TOKEN)
    assert num_tokens > len(prompts) * NEW_TOKENS / 2, "too little was generated to prove anything"
