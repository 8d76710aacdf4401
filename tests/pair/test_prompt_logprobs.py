"""Tests that the log-probabilities of a prompt's own tokens are those of transformers, however the prompt is computed,
and come once. With `max_tokens` 0 nothing else comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.attention.backend import ForwardInput
from common.errors import EngineFault
from common.model.target import TargetModel, TargetOutput
from common.prompts import chunk_batch
from common.sampling.params import ResolvedSampling
from common.sampling.prompt_logprobs import PromptLogprobs
from common.wire.handoff import Frame, KvSegment, PrebuiltBatch, RowLogprobs
from decode_service.messages import FinishReason
from tests.support.drafted import Drafted
from tests.support.pair import MakePair, Outcome, PairOptions
from tests.support.reference import prompt_logprobs

Tiny = Callable[[str], TargetModel]
TinyDir = Callable[[str], Path]

TOLERANCE = 1e-4
PROMPT = [30 + (place * 37 + place * place) % 200 for place in range(70)]
NUM_TOP = 3
PLAIN = ResolvedSampling(seed=0, max_tokens=6, temperature=0.0)
SCORED = replace(PLAIN, num_prompt_logprobs=NUM_TOP)
ALONE = replace(SCORED, max_tokens=0)
CHUNKS = PairOptions(chunk_tokens=16, max_batch_tokens=48)
LOCAL = PairOptions(local_prefill_tokens=96)


def joined(outcome: Outcome) -> PromptLogprobs:
    """Returns all log-probabilities of a prompt. Raises AssertionError unless each position from 1 on came once, in
    order.
    """
    parts = outcome.prompt_logprobs
    assert parts and parts[0].start == 1
    assert all(one.stop == other.start for one, other in pairwise(parts))
    columns = zip(*((each.logprobs, each.ranks, each.top_ids, each.top_values) for each in parts), strict=True)
    return PromptLogprobs(1, *(np.concatenate(column) for column in columns))


def assert_those_of_transformers(outcome: Outcome, directory: Path, prompt: Sequence[int], *, num_top: int) -> None:
    expected = prompt_logprobs(directory, prompt)
    found = joined(outcome)
    assert found.stop == len(prompt)
    own = expected[range(len(prompt) - 1), prompt[1:]]
    assert found.logprobs == pytest.approx(own.numpy(), abs=TOLERANCE)
    top = expected.topk(num_top, dim=-1)
    assert found.top_values == pytest.approx(top.values.numpy(), abs=TOLERANCE)
    assert np.count_nonzero(found.top_ids != top.indices.numpy()) <= 0.1 * found.top_ids.size  # near ties
    ranks = (expected > own.unsqueeze(1)).sum(dim=1).numpy() + 1
    assert abs(found.ranks - ranks).max() <= 2  # near ties


@pytest.mark.parametrize(
    "options",
    [
        PairOptions(chunk_tokens=512, max_batch_tokens=512),
        CHUNKS,
        replace(CHUNKS, overlap=False),
        LOCAL,
        PairOptions(prefill_fallback=True),
    ],
    ids=["one chunk", "chunks of 16", "no overlap", "computed in decode", "decode alone"],
)
def test_they_are_those_of_transformers_beside_prompts_without(
    options: PairOptions, make_pair: MakePair, tiny_target: Tiny, tiny_model_dir: TinyDir
) -> None:
    pair = make_pair(tiny_target("llama"), options)
    if options.prefill_fallback:
        pair.replicas[0].lose()
        pair.step_decode()
    shaped = replace(
        PLAIN, temperature=1.7, top_k=5, repetition_penalty=1.5, presence_penalty=1.0, logit_bias=((PROMPT[5], 50.0),)
    )
    samplings = {"a": PLAIN, "b": PLAIN, "c": PLAIN, "d": PLAIN, "shaped": shaped}
    prompts = {name: PROMPT[start:] for start, name in enumerate(samplings)}
    scored = {"a": NUM_TOP, "b": 0, "d": 7, "shaped": NUM_TOP}
    others = make_pair(tiny_target("llama"))
    for name, prompt in prompts.items():
        pair.submit(name, prompt, replace(samplings[name], num_prompt_logprobs=scored.get(name)))
        others.submit(name, prompt, samplings[name])
    pair.run()
    others.run()
    for name, num_top in scored.items():
        assert_those_of_transformers(pair.outcomes[name], tiny_model_dir("llama"), prompts[name], num_top=num_top)
    assert pair.outcomes["c"].prompt_logprobs == []
    for name in prompts:
        assert pair.outcomes[name].token_ids == others.outcomes[name].token_ids, "the output is the same"


@pytest.mark.parametrize("name", ["leaning", "guessing_layers"])
@pytest.mark.parametrize("options", [CHUNKS, LOCAL], ids=["handed over", "computed in decode"])
def test_a_draft_head_changes_nothing(
    name: str, options: PairOptions, make_pair: MakePair, request: pytest.FixtureRequest
) -> None:
    drafted: Drafted = request.getfixturevalue(name)
    prompt = [token % 60 for token in PROMPT]
    pair = make_pair(drafted.target, replace(options, num_draft_tokens=3), draft=drafted.head)
    outcomes = [pair.submit(str(number), prompt, sampling) for number, sampling in enumerate((SCORED, PLAIN, ALONE))]
    pair.run()
    for outcome in (outcomes[0], outcomes[2]):
        assert_those_of_transformers(outcome, drafted.directory, prompt, num_top=NUM_TOP)
    assert outcomes[0].token_ids == outcomes[1].token_ids != []


@pytest.mark.parametrize("options", [CHUNKS, LOCAL], ids=["handed over", "computed in decode"])
def test_a_cached_prompt_still_has_all_of_them_and_leaves_its_kv(
    options: PairOptions, make_pair: MakePair, tiny_target: Tiny, tiny_model_dir: TinyDir
) -> None:
    pair = make_pair(tiny_target("llama"), options)
    for name, sampling in (("cold", SCORED), ("warm", SCORED), ("plain", PLAIN), ("alone", ALONE)):
        pair.submit(name, PROMPT, sampling, cache_salt="")
        pair.run()
        if name == "warm":
            assert pair.decode.load().num_expected_cached == 0, "the replica computes all of it, and is chosen so"
    for name in ("cold", "warm", "alone"):
        assert_those_of_transformers(pair.outcomes[name], tiny_model_dir("llama"), PROMPT, num_top=NUM_TOP)
    plain = pair.outcomes["plain"].finished
    assert plain is not None and plain.timings.num_cached_tokens == len(PROMPT) - 1
    assert pair.outcomes["warm"].token_ids == pair.outcomes["plain"].token_ids
    pair.settle()


def test_prompts_without_them_add_no_logits(
    make_pair: MakePair, tiny_target: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_logits: list[int] = []
    forward = TargetModel.forward

    def counted(self: TargetModel, batch: ForwardInput, **options: Any) -> TargetOutput:
        assert batch.logits_rows is not None
        num_logits.append(len(batch.logits_rows))
        return forward(self, batch, **options)

    pair = make_pair(tiny_target("llama"), PairOptions(chunk_tokens=512, max_batch_tokens=512))
    pair.submit("scored", PROMPT[:30], ALONE)
    pair.submit("plain", PROMPT, PLAIN)
    with monkeypatch.context() as patch:
        patch.setattr(TargetModel, "forward", counted)
        pair.finish_prefill()
    assert num_logits == [29 + 1 + 1]
    pair.run()


def test_nobody_waits_for_kv_that_is_not_used_or_does_not_come(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), CHUNKS)
    for name, sampling in (("alone", ALONE), ("plain", PLAIN), ("scored", SCORED), ("waits", PLAIN)):
        pair.submit(name, PROMPT, sampling, cache_salt="")
    pair.step_decode()
    assert [row.request_id for row in pair.handed_over] == ["alone", "plain", "scored"]
    pair.run()
    assert pair.outcomes["waits"].token_ids == pair.outcomes["plain"].token_ids


def test_logits_are_bounded_and_the_values_the_same(
    make_pair: MakePair, tiny_target: Tiny, tiny_model_dir: TinyDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("llama")
    monkeypatch.setattr(chunk_batch, "MAX_LOGITS_BYTES", 4 * target.vocab_size * 10)
    pair = make_pair(target, PairOptions(chunk_tokens=512, max_batch_tokens=512))
    num_scored: list[int] = []

    def tamper(frame: Frame) -> Sequence[Frame]:
        num_scored.append(len(frame.logprobs.logprobs) if isinstance(frame, RowLogprobs) else 0)
        return [frame]

    pair.tamper = tamper
    outcomes = [pair.submit(str(number), PROMPT[number:], SCORED) for number in range(2)]
    pair.run()
    assert max(num_scored) == 10
    assert max(stats.num_tokens for stats in pair.prefill_steps) <= 10 + 1  # and the prompt's last token
    for number, outcome in enumerate(outcomes):
        assert_those_of_transformers(outcome, tiny_model_dir("llama"), PROMPT[number:], num_top=NUM_TOP)


def test_a_retry_brings_only_those_that_are_missing(
    make_pair: MakePair, tiny_target: Tiny, tiny_model_dir: TinyDir
) -> None:
    pair = make_pair(tiny_target("llama"), replace(CHUNKS, num_replicas=2))
    num_parts = 0

    def tamper(frame: Frame) -> Sequence[Frame]:
        nonlocal num_parts
        num_parts += isinstance(frame, RowLogprobs)
        return [frame] if num_parts <= 2 else []

    pair.tamper = tamper
    outcome = pair.submit("scored", PROMPT, SCORED, cache_salt="")
    pair.run(until=lambda: num_parts > 2 and len(outcome.prompt_logprobs) == 2)
    pair.tamper = None
    (busy,) = (replica for replica in pair.replicas if replica.engine.load().num_steps)
    busy.lose()
    pair.run()
    assert len(pair.handed_over) == 2
    assert_those_of_transformers(outcome, tiny_model_dir("llama"), PROMPT, num_top=NUM_TOP)
    assert len(outcome.token_ids) == PLAIN.max_tokens


def test_a_retraction_does_not_bring_them_again_and_uses_the_cache(
    make_pair: MakePair, tiny_target: Tiny, tiny_model_dir: TinyDir
) -> None:
    pair = make_pair(tiny_target("llama"), replace(CHUNKS, decode_tokens=200))
    long = replace(SCORED, max_tokens=60)
    outcomes = [pair.submit(str(number), PROMPT[number:], long, cache_salt="") for number in range(2)]
    pair.finish_prefill()
    pair.run()
    assert pair.decode.load().num_retractions > 0
    for number, outcome in enumerate(outcomes):
        assert len(outcome.token_ids) == 60
        assert_those_of_transformers(outcome, tiny_model_dir("llama"), PROMPT[number:], num_top=NUM_TOP)
    again = [row for row in pair.handed_over if len(row.token_ids) > row.prompt_len]
    assert again and all(row.sampling.num_prompt_logprobs is None for row in again)


@pytest.mark.parametrize(
    ("sampling", "num_prompt", "has_some"),
    [(SCORED, 1, False), (ALONE, 1, False), (SCORED, 2, True), (replace(PLAIN, max_tokens=0), 70, False)],
    ids=["one token", "one token alone", "two tokens", "none asked for"],
)
@pytest.mark.parametrize("options", [CHUNKS, LOCAL], ids=["handed over", "computed in decode"])
def test_short_prompts_and_nothing_at_all(
    sampling: ResolvedSampling,
    num_prompt: int,
    has_some: bool,
    options: PairOptions,
    make_pair: MakePair,
    tiny_target: Tiny,
) -> None:
    pair = make_pair(tiny_target("llama"), options)
    outcome = pair.submit("short", PROMPT[:num_prompt], sampling)
    pair.run()
    assert bool(outcome.prompt_logprobs) is has_some
    assert len(outcome.token_ids) == sampling.max_tokens


@pytest.mark.parametrize("options", [CHUNKS, LOCAL], ids=["handed over", "computed in decode"])
def test_without_output_nothing_but_the_log_probabilities_comes(
    options: PairOptions, make_pair: MakePair, tiny_target: Tiny, tiny_model_dir: TinyDir
) -> None:
    """The prompt ends with an end token, which must not end the request as an output's end token would."""
    pair = make_pair(tiny_target("llama"), options)
    frames: list[Frame] = []

    def tamper(frame: Frame) -> Sequence[Frame]:
        frames.append(frame)
        return [frame]

    pair.tamper = tamper
    outcome = pair.submit("alone", PROMPT, replace(ALONE, eos_token_ids=(PROMPT[-1],), num_logprobs=2))
    pair.run()
    assert_those_of_transformers(outcome, tiny_model_dir("llama"), PROMPT, num_top=NUM_TOP)
    assert outcome.finished is not None and outcome.token_ids == []
    assert outcome.finished.reason is FinishReason.LENGTH
    assert (outcome.finished.num_prompt_tokens, outcome.finished.num_completion_tokens) == (len(PROMPT), 0)
    assert not [frame for frame in frames if isinstance(frame, KvSegment)]
    assert outcome.finished.timings.kv_bytes == 0
    pair.settle()


def test_a_prompt_without_output_takes_no_slots_of_decode(
    make_pair: MakePair, tiny_target: Tiny, tiny_model_dir: TinyDir
) -> None:
    pair = make_pair(tiny_target("llama"), replace(CHUNKS, decode_tokens=len(PROMPT) + PLAIN.max_tokens))
    alone = [pair.submit(f"alone {number}", PROMPT, ALONE) for number in range(4)]
    others = [pair.submit(f"other {number}", PROMPT, PLAIN) for number in range(2)]
    pair.step_decode()
    assert len(pair.handed_over) == len(alone)
    pair.run()
    assert pair.decode.load().num_retractions == 0
    for outcome in alone:
        assert_those_of_transformers(outcome, tiny_model_dir("llama"), PROMPT, num_top=NUM_TOP)
    assert others[0].token_ids == others[1].token_ids != []


Corrupt = Callable[[RowLogprobs], Sequence[Frame]]
BROKEN: dict[str, Corrupt] = {
    "come twice": lambda frame: [frame, frame],
    "are missing": lambda frame: [],
    "begin too late": lambda frame: [replace(frame, logprobs=frame.logprobs.part(2, frame.logprobs.stop))],
}


@pytest.mark.parametrize("name", BROKEN)
def test_log_probabilities_that_do_not_fit_fail_their_row_alone(
    name: str, make_pair: MakePair, tiny_target: Tiny
) -> None:
    pair = make_pair(tiny_target("llama"), CHUNKS)
    broken: list[Frame] = []

    def tamper(frame: Frame) -> Sequence[Frame]:
        if not broken and isinstance(frame, RowLogprobs):
            broken.append(frame)
            return BROKEN[name](frame)
        return [frame]

    pair.tamper = tamper
    victim = pair.submit("victim", PROMPT, SCORED)
    other = pair.submit("other", PROMPT, PLAIN)
    pair.run()
    assert isinstance(victim.error, EngineFault) and victim.token_ids == []
    assert len(other.token_ids) == PLAIN.max_tokens
    pair.settle()


def test_log_probabilities_after_the_first_token_are_refused(make_pair: MakePair, tiny_target: Tiny) -> None:
    pair = make_pair(tiny_target("llama"), PairOptions(chunk_tokens=512, max_batch_tokens=512))
    kept: list[Frame] = []

    def tamper(frame: Frame) -> Sequence[Frame]:
        if isinstance(frame, RowLogprobs):
            kept.append(frame)
            return []
        return [frame, *kept] if isinstance(frame, PrebuiltBatch) else [frame]

    pair.tamper = tamper
    victim = pair.submit("victim", PROMPT, SCORED)
    pair.run()
    assert isinstance(victim.error, EngineFault)
    pair.tamper = None
    pair.settle()
