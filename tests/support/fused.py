"""Models with fused forwards (the whole model as one compiled kernel), and checks that these forwards were used."""

from __future__ import annotations

import copy
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

from baton_cpu.program.fusing import fuse
from common.draft.paged_head import PagedHead
from common.model.target import TargetModel
from common.telemetry.stats import ForwardCounts

BOUND_S = 60.0
ModelT = TypeVar("ModelT", TargetModel, PagedHead)


@contextmanager
def fused(
    target: TargetModel, head: PagedHead | None = None, *, max_tokens: int
) -> Iterator[tuple[TargetModel, PagedHead | None]]:
    """Yields fused models for one engine: copies that share the given models' weights, since a fused program belongs to
    one engine.

    At the end it raises AssertionError unless every forward ran fused.
    """
    own_target, own_head = _own(target), None if head is None else _own(head)
    fuse(own_target, own_head, num_threads=1, max_tokens=max_tokens)
    try:
        yield own_target, own_head
        for model in (own_target, own_head):
            assert model is None or (model.forward_counts.num_fused and not model.forward_counts.num_declined)
    finally:
        assert own_target._program is not None
        assert own_target._program.close(BOUND_S), "a thread of the team did not end"


def _own(model: ModelT) -> ModelT:
    own = copy.copy(model)
    own.forward_counts = ForwardCounts()
    return own


def forwards(metrics_address: str) -> Counter[str]:
    """Returns the numbers of forwards of a service so far, read from its metrics.

    The keys are `every target`, `fused target`, `fused draft`, `declined target` and `declined draft`.
    """
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=BOUND_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    kinds = {"baton_fused_forwards": "fused", "baton_declined_forwards": "declined", "baton_batch_size": "every"}
    return Counter(
        {
            f"{kinds[family.name]} {sample.labels.get('model', 'target')}": int(sample.value)
            for family in families
            for sample in family.samples
            if family.name in kinds and sample.name.endswith(("_total", "_count"))
        }
    )


def assert_all_fused(meanwhile: Counter[str], *, drafts: bool) -> None:
    """Asserts that all forwards were fused. `meanwhile` is the difference between two results of `forwards`, and
    `drafts` says whether the head must have run.
    """
    assert meanwhile["fused target"] == meanwhile["every target"] > 0, meanwhile
    assert not meanwhile["declined target"] and not meanwhile["declined draft"], meanwhile
    assert bool(meanwhile["fused draft"]) == drafts, meanwhile
