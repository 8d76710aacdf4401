"""Tests the phases that the decode engine reports for a traced request, including those it enters again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from decode_service.messages import FinishAtStop, Phase, PhaseBegan
from tests.support.faulty_target import FailsFirst, FaultyTarget, is_decode
from tests.support.pair import MakePair, PairOptions

PREFILLED = [Phase.PREFILL, Phase.TRANSFER, Phase.BOOTSTRAP]
DECODED = [Phase.FIRST_DECODE, Phase.DECODE, Phase.DELIVERY]

Tiny = Callable[[str], TargetModel]


def sampling(max_tokens: int) -> ResolvedSampling:
    return ResolvedSampling(seed=1, max_tokens=max_tokens)


def names(phases: Sequence[PhaseBegan]) -> list[Phase]:
    return [began.phase for began in phases]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_a_traced_request_tells_its_phases_in_order(overlap: bool, make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(overlap=overlap))
    traced = pair.submit("traced", range(10, 40), sampling(6), is_traced=True)
    other = pair.submit("other", range(10, 40), sampling(6))
    pair.run()

    assert names(traced.phases) == PREFILLED + DECODED
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(traced.phases))
    assert traced.phases[0].replica == "replica-0"
    assert not other.phases
    assert traced.finished is not None
    timings = traced.finished.timings
    by_phase = {began.phase: began.at_s for began in traced.phases}
    assert by_phase[Phase.TRANSFER] - by_phase[Phase.PREFILL] == pytest.approx(timings.prefill_s)
    assert by_phase[Phase.BOOTSTRAP] - by_phase[Phase.TRANSFER] == pytest.approx(timings.transfer_s)
    assert by_phase[Phase.DECODE] - by_phase[Phase.BOOTSTRAP] == pytest.approx(timings.first_decode_s)
    assert by_phase[Phase.DELIVERY] - by_phase[Phase.DECODE] == pytest.approx(timings.decode_s)


def test_a_request_that_ends_with_its_first_token_never_decodes(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"))
    outcome = pair.submit("r", range(10, 40), sampling(1), is_traced=True)
    pair.run()

    assert names(outcome.phases) == [*PREFILLED, Phase.DELIVERY]


def test_a_request_that_ends_at_a_stop_string_is_left_to_be_delivered(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"))
    outcome = pair.submit("r", range(10, 40), sampling(200), is_traced=True)
    pair.run(until=lambda: len(outcome.token_ids) >= 3)
    pair.post(FinishAtStop("r", 3, "stop"))
    pair.run()

    assert names(outcome.phases) == PREFILLED + DECODED


def test_a_retracted_request_queues_again(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(decode_tokens=96))
    outcomes = [pair.submit(str(n), range(10, 30), sampling(48), is_traced=True) for n in range(4)]
    pair.finish_prefill()
    pair.run()

    assert pair.decode.load().num_retractions > 0
    for outcome in outcomes:
        assert outcome.finished is not None
        again = [began for began in outcome.phases if began.phase is Phase.QUEUE]
        assert len(again) == outcome.finished.timings.num_retractions
        assert all(began.was_retracted and not began.lost for began in again)
        assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(outcome.phases))
        assert names(outcome.phases).count(Phase.PREFILL) == outcome.finished.timings.num_handoff_attempts
        assert outcome.phases[-1].phase is Phase.DELIVERY


def test_a_lost_handoff_tells_why_and_the_next_one_is_another_attempt(make_pair: MakePair, tiny_target: Tiny) -> None:
    model = FaultyTarget(tiny_target("llama"))
    model.fails = FailsFirst(lambda batch: not is_decode(batch))
    pair = make_pair(model)
    outcome = pair.submit("r", range(10, 40), sampling(6), is_traced=True)
    pair.run()

    assert names(outcome.phases) == [Phase.PREFILL, Phase.QUEUE, *PREFILLED, *DECODED]
    assert "planted" in outcome.phases[1].lost and not outcome.phases[1].was_retracted
    assert [began.attempt for began in outcome.phases if began.phase is Phase.PREFILL] == [0, 1]


def test_a_row_that_is_lost_in_transfer_queues_again(make_pair: MakePair, tiny_target: Tiny) -> None:
    narrow = PairOptions(
        num_replicas=2, max_segment_bytes=2048, send_budget_bytes=2048, receive_budget_bytes=2048
    )  # the first token comes before most of the KV
    pair = make_pair(tiny_target("llama"), narrow)
    outcome = pair.submit("r", range(10, 40), sampling(6), is_traced=True)
    pair.finish_prefill()
    pair.run(until=lambda: Phase.TRANSFER in names(outcome.phases))
    pair.replicas[0].lose()
    pair.run()

    assert names(outcome.phases) == [Phase.PREFILL, Phase.TRANSFER, Phase.QUEUE, *PREFILLED, *DECODED]
    assert [began.replica for began in outcome.phases if began.replica] == ["replica-0", "replica-1"]


def test_a_prompt_that_is_computed_here_is_not_transferred(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(local_prefill_tokens=64))
    outcome = pair.submit("r", range(10, 40), sampling(6), is_traced=True)
    pair.run()

    assert names(outcome.phases) == [Phase.LOCAL_PREFILL, Phase.BOOTSTRAP, *DECODED]
    assert outcome.finished is not None
    timings = outcome.finished.timings
    by_phase = {began.phase: began.at_s for began in outcome.phases}
    assert by_phase[Phase.BOOTSTRAP] - by_phase[Phase.LOCAL_PREFILL] == pytest.approx(timings.prefill_s)
    assert (timings.transfer_s, timings.num_handoff_attempts) == (0.0, 0)
