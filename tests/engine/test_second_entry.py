"""Tests that a replica which names a row twice in PrebuiltBatch entries, in one frame or in two, is treated as breaking
the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from common.device.scripted import ScriptedDevice
from common.sampling.params import ResolvedSampling
from common.wire.handoff import PrebuiltBatch
from decode_service.messages import Submit
from decode_service.schedule.landing import FrameRejected, LandingZone
from decode_service.schedule.request import Request
from tests.engine.relay_rig import make_pool
from tests.engine.tags import GROUP, VOCAB_SIZE


def entries_of(rows: Sequence[int]) -> PrebuiltBatch:
    number = len(rows)
    return PrebuiltBatch(
        rows=np.array(rows),
        seq_lens=np.full(number, 2),
        first_token_ids=np.full(number, 1),
        bytes_sent={GROUP.name: np.full(number, 2 * GROUP.token_bytes)},
        queue_s=np.zeros(number),
        compute_s=np.zeros(number),
        num_cached_tokens=np.zeros(number, np.int64),
        first_token_logprobs=(None,) * number,
        seed_columns={},
    )


@pytest.mark.parametrize("frames", [[[0, 1, 1]], [[0, 1], [1]]], ids=["one frame", "two frames"])
def test_a_second_entry_of_a_row_is_rejected_naming_it(frames: list[list[int]]) -> None:
    pool = make_pool()
    device = ScriptedDevice()
    zone = LandingZone(device=device, pool=pool, vocab_size=VOCAB_SIZE, nontemporal_copies=False)
    reqs = []
    for number in range(2):
        submit = Submit(str(number), (1, 2), 2, ResolvedSampling(seed=0, max_tokens=1))
        reqs.append(Request.of(submit, arrival=number, now_s=0.0))
        reqs[-1].lease = pool.reserve(2)
    zone.open("call", "replica", reqs)
    *earlier, last = frames
    for rows in earlier:
        assert len(zone.take_frame("call", entries_of(rows))) == len(rows)
    with pytest.raises(FrameRejected, match="row 1: a second PrebuiltBatch entry"):
        zone.take_frame("call", entries_of(last))
    assert not zone.poll().ready
