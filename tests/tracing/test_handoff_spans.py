"""Tests of the prefill edge's spans of a row: they belong to the right request, and each one ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from common.wire.codec_commands import encode_prefill_batch
from prefill_service.edge.call import HandoffCall, ReplicaLimits, RowNumbering
from prefill_service.edge.observer import RowTraces
from prefill_service.edge.servicer import HandoffLimits, PrefillServicer
from prefill_service.messages import ChunkComputed, RowStarted
from tests.handoff.samples import FINGERPRINT, failed, row
from tests.handoff.scripted_prefill import BOUND_S, ScriptedPrefill
from tests.support.no_matchers import no_matchers
from tests.tracing.spans import EndedSpans
from tests.wire.strategies import VOCAB_SIZE

TRACED = replace(row(), traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01")


class OneCommand:
    """The context of a call whose receiver sends one batch, takes every frame, and sends nothing more."""

    def __init__(self, batch: bytes) -> None:
        self._batch: bytes | None = batch

    async def read(self) -> bytes:
        batch, self._batch = self._batch, None
        if batch is None:
            await asyncio.Event().wait()
        assert batch is not None
        return batch

    async def write(self, data: bytes) -> None:
        return None


async def test_rows_of_a_call_that_breaks_off_end_with_it() -> None:
    spans, prefill = EndedSpans(), ScriptedPrefill()
    servicer = PrefillServicer(
        engine=prefill,
        fingerprint=FINGERPRINT,
        model_limits=ReplicaLimits(vocab_size=VOCAB_SIZE, max_context_tokens=4096),
        instance_id="here",
        limits=HandoffLimits(),
        new_matcher=no_matchers,
        tracer=spans.tracer,
    )
    context: Any = OneCommand(encode_prefill_batch(FINGERPRINT, (row(), TRACED)))
    call = asyncio.create_task(servicer.handoff(context, context))
    opened = await asyncio.to_thread(prefill.opened)
    assert opened[0].traced_rows == {1}, "the engine tells of no other"
    call.cancel()
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(asyncio.CancelledError):
            await call

    attributes = spans.named("prefill_row").attributes
    assert attributes is not None and attributes["error.type"] == "CALL_ENDED"


def test_a_cancelled_row_ends_at_once() -> None:
    spans = EndedSpans()
    traces = RowTraces(spans.tracer)
    call = HandoffCall("call", RowNumbering([TRACED, TRACED]), traces)
    traces.begin([(0, TRACED), (1, TRACED)])
    call.cancel([1])

    attributes = spans.named("prefill_row").attributes
    assert attributes is not None and attributes["error.type"] == "CANCELLED"


def test_the_engines_numbers_are_not_the_calls_where_a_row_was_refused() -> None:
    spans = EndedSpans()
    traces = RowTraces(spans.tracer)
    call = HandoffCall("call", RowNumbering([failed(0), TRACED]), traces)
    traces.begin([(1, TRACED)])
    call.take(RowStarted("call", 0, 1.0))
    call.take(ChunkComputed("call", 0, 0, 16, 1, 16, 1.0, 2.0))

    assert spans.names() == ["queue", "chunk"]
