"""Tests that a request which brings the output of an earlier stream continues as the uninterrupted request would
have.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from common.model.target import TargetModel
from common.sampling.params import ResolvedSampling
from decode_service.messages import FinishReason
from tests.support.pair import InProcessPair, MakePair, PairOptions

PROMPT = [31, 77, 150, 203, 48, 99, 121, 64, 180, 15, 220, 36]
NEW_TOKENS = 32
SAMPLINGS = {
    "greedy": ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, temperature=0.0),
    "sampled": ResolvedSampling(seed=1 << 63 | 77, max_tokens=NEW_TOKENS, temperature=1.3, top_k=50, min_p=0.01),
    "penalised": ResolvedSampling(
        seed=0,
        max_tokens=NEW_TOKENS,
        temperature=0.0,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.9,
        logit_bias=((9, 9.0), (11, 8.0)),
    ),
    "minimum length": ResolvedSampling(
        seed=0,
        max_tokens=NEW_TOKENS,
        temperature=0.0,
        min_tokens=NEW_TOKENS // 2,
        eos_token_ids=(2,),
        logit_bias=((2, 30.0),),
    ),
    "logprobs": ResolvedSampling(seed=0, max_tokens=NEW_TOKENS, temperature=0.0, num_logprobs=4),
}
NUM_DELIVERED = (1, 7, NEW_TOKENS // 2 - 1, NEW_TOKENS // 2)

Tiny = Callable[[str], TargetModel]


@pytest.fixture
def pair(make_pair: MakePair, tiny_target: Tiny) -> InProcessPair:
    return make_pair(tiny_target("llama"), PairOptions(chunk_tokens=8))


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_resumed_stream_continues_exactly(name: str, pair: InProcessPair) -> None:
    sampling = SAMPLINGS[name]
    whole = pair.submit("whole", PROMPT, sampling)
    pair.run()
    assert whole.finished is not None and len(whole.token_ids) > NEW_TOKENS // 2
    for num_delivered in NUM_DELIVERED:
        delivered = whole.token_ids[:num_delivered]
        pair.submit(f"from {num_delivered}", [*PROMPT, *delivered], sampling, prompt_len=len(PROMPT))
    pair.run()
    for num_delivered in NUM_DELIVERED:
        rest = pair.outcomes[f"from {num_delivered}"]
        assert rest.token_ids == whole.token_ids[num_delivered:]
        assert [entry.top_ids for entry in rest.logprobs] == [e.top_ids for e in whole.logprobs[num_delivered:]]
        assert rest.finished is not None
        assert rest.finished.reason is whole.finished.reason


def test_output_that_was_brought_along_counts_as_output(pair: InProcessPair) -> None:
    """If the brought tokens counted as prompt, the same limits would give a longer answer and other token counts."""
    whole = pair.submit("whole", PROMPT, SAMPLINGS["greedy"])
    pair.run()
    rest = pair.submit("rest", [*PROMPT, *whole.token_ids[:10]], SAMPLINGS["greedy"], prompt_len=len(PROMPT))
    pair.run()
    assert len(rest.token_ids) == NEW_TOKENS - 10
    assert rest.finished is not None
    assert (rest.finished.num_prompt_tokens, rest.finished.num_completion_tokens) == (len(PROMPT), NEW_TOKENS)
    assert rest.finished.reason is FinishReason.LENGTH


def test_prompt_tokens_and_output_tokens_are_penalised_differently(pair: InProcessPair) -> None:
    """Some penalties count only output, which includes tokens delivered by an earlier stream. The same ids as prompt
    tokens give other output.
    """
    whole = pair.submit("whole", PROMPT, SAMPLINGS["penalised"])
    pair.run()
    ids = [*PROMPT, *whole.token_ids[:16]]
    as_output = pair.submit("as output", ids, SAMPLINGS["penalised"], prompt_len=len(PROMPT))
    as_prompt = pair.submit("as prompt", ids, SAMPLINGS["penalised"])
    pair.run()
    assert as_output.token_ids == whole.token_ids[16:] != as_prompt.token_ids[:16]


def test_a_resumed_request_survives_retraction(make_pair: MakePair, tiny_target: Tiny) -> None:
    whole_pair = make_pair(tiny_target("llama"))
    wholes = {name: whole_pair.submit(name, PROMPT, SAMPLINGS[name]) for name in SAMPLINGS}
    whole_pair.run()
    pair = make_pair(tiny_target("llama"), PairOptions(decode_tokens=80))
    for name, whole in wholes.items():
        pair.submit(name, [*PROMPT, *whole.token_ids[:5]], SAMPLINGS[name], prompt_len=len(PROMPT))
    pair.finish_prefill()
    pair.run()
    assert pair.decode.load().num_retractions > 0
    for name, whole in wholes.items():
        assert pair.outcomes[name].token_ids == whole.token_ids[5:], name
