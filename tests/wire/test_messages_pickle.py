"""Tests that the messages between the decode engine and its edges can be pickled, as those of edge processes are."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

import decode_service.messages as decode
from common.drain import Drain
from common.errors import EngineFault, FingerprintMismatch, InvalidRequest, RowFailure
from common.kv.shared_kv import PoolTicket, SharedKv
from common.sampling.params import ResolvedSampling, TokenLogprobs
from common.telemetry.stats import Timings
from common.wire.handoff import Accepted, KvSegment, RowFailed
from tests.wire.strategies import SPECULATIVE, comparable
from tests.wire.wire_samples import LOGPROBS_ROW, PLAIN_ROW, SCORED_ROW, prebuilt_batch, row_logprobs

ROWS = (PLAIN_ROW, LOGPROBS_ROW, SCORED_ROW)
SAMPLING = ResolvedSampling(seed=2**64 - 1, max_tokens=4, logit_bias=((1, -0.5),), num_logprobs=1)
SEGMENT = KvSegment(0, "target", 0, 1, 0, 3, b"\x00\x01\x02")
LENT = replace(
    SEGMENT,
    payload=b"",
    shared=SharedKv(PoolTicket((1, 3), 7, 2), np.zeros((1, 2, 4, 3), np.uint8), np.array([0, 7, 0, 7], np.uint64)),
)
FRAMES = (
    Accepted("instance"),
    SEGMENT,
    LENT,
    row_logprobs(2),
    prebuilt_batch(SPECULATIVE, ROWS),
    RowFailed(1, RowFailure.COMPUTE, True, 5, "why"),
)
SAMPLES: tuple[object, ...] = (
    decode.Submit("id", (1, 2), 2, SAMPLING, choice_index=3, cache_salt="tenant"),
    decode.Abort("id"),
    decode.FinishAtStop("id", 3, "stop"),
    Drain(),
    decode.ReplicasChanged(
        (decode.Replica("a:1", True, 3), decode.Replica("b:1", False, error=FingerprintMismatch("algorithm", "a", "b")))
    ),
    *(decode.FrameArrived("call", frame) for frame in FRAMES),
    decode.CallEnded("call", None),
    decode.CallEnded("call", FingerprintMismatch("algorithm", "eagle", "none")),
    decode.PhaseBegan("id", decode.Phase.PREFILL, 1.5, replica="a:1", attempt=1),
    decode.PhaseBegan("id", decode.Phase.QUEUE, 1.5, lost="why", was_retracted=True),
    decode.RowTaken("id"),
    decode.Tokens(("id", "other"), (1, 2), (1, 2, 3), (TokenLogprobs(-0.5, (1,), (-0.5,)), None, None)),
    decode.PromptScored("id", row_logprobs(2).logprobs),
    decode.Finished("id", decode.FinishReason.EOS, 2, 1, Timings(queue_s=1.0, num_cached_tokens=2), stop_token_id=2),
    decode.Failed("id", EngineFault("broken")),
    decode.Failed("id", InvalidRequest("prompt", "is empty")),
    decode.StartHandoff("call", "a:1", ROWS),
    decode.CancelHandoffRows("call", (1,)),
    decode.BreakCall("call", "why"),
    decode.SegmentsLanded("call", 3, (1, 2)),
    decode.DegradedChanged(True, "why"),
)


@pytest.mark.parametrize("value", SAMPLES, ids=lambda value: type(value).__name__)
def test_a_message_survives_pickling(value: object) -> None:
    assert comparable(pickle.loads(pickle.dumps(value))) == comparable(value)


def test_every_kind_of_message_has_a_sample() -> None:
    exchanged = (decode.Command, decode.Event)
    kinds = {kind for union in exchanged for kind in get_args(union)}
    assert kinds == {type(value) for value in SAMPLES}
