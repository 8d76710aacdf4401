"""Tests that output under a grammar is that of the masked distribution, token for token, in every mode of the pair."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from common.device.stream import Device
from common.errors import InvalidRequest
from common.grammar.grammar import Grammar, GrammarKind
from common.grammar.matcher import ALL_ALLOWED, Mask
from common.request_stats import SpeculationCounts
from common.text.grammars import LlgMatcher
from decode_service.messages import FinishReason
from decode_service.schedule import grammars, scheduler
from decode_service.schedule.request import Request
from decode_service.schedule.results import BegunStep, ResultTaker
from tests.engine.mutants.grammars import forced_tokens_one_too_far, nobody_looks_ahead
from tests.support.drafted import SHAPES, Counts, Drafted
from tests.support.engines import cpu_device
from tests.support.languages import END, LANGUAGES, NEW_TOKENS, PROMPTS, TOKENIZER, Language, sampling_of, submit_all
from tests.support.models import END_ID
from tests.support.pair import InProcessPair, MakePair, Outcome, PairOptions


def text_of(outcome: Outcome) -> str:
    return "".join(TOKENIZER.convert_ids_to_tokens([token for token in outcome.token_ids if token != END_ID]))


def greedy(model: Any, prompt: Sequence[int], language: Language) -> list[int]:
    """Returns the greedy output after the prompt, with each choice limited to the tokens that the language allows,
    computed by transformers.
    """
    output: list[int] = []
    while len(output) < NEW_TOKENS and END_ID not in output:
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1]
        allowed = language.allowed_after(output)
        output.append(allowed[int(logits[allowed].argmax())])
    return output


def run(
    make_pair: MakePair,
    drafted: Drafted,
    options: PairOptions,
    *,
    has_head: bool = True,
    new_device: Callable[[], Device] = cpu_device,
    **sampling: Any,
) -> InProcessPair:
    pair = make_pair(drafted.target, options, draft=drafted.head if has_head else None, new_device=new_device)
    return submit_all(pair, **sampling)


@pytest.fixture(scope="module")
def model(leaning: Drafted) -> Any:
    return AutoModelForCausalLM.from_pretrained(str(leaning.directory), dtype=torch.float32)


@pytest.fixture(scope="module")
def expected(model: Any) -> dict[str, list[int]]:
    with torch.no_grad():
        return {
            f"{number} bound": greedy(model, prompt, LANGUAGES[number % len(LANGUAGES)])
            for number, prompt in enumerate(PROMPTS)
        }


def check_greedy(make_pair: MakePair, leaning: Drafted, expected: dict[str, list[int]], shape: str = "chain-4") -> None:
    pair = run(make_pair, leaning, PairOptions(**SHAPES[shape]))
    for name, token_ids in expected.items():
        assert pair.outcomes[name].token_ids == token_ids, f"{name} differs: {pair.outcomes[name].error}"
    counts = Counts.of(pair.outcomes[name] for name in expected)
    assert counts.num_accepted > 20 and counts.num_rejected > 20


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("shape", [None, "chain-4", "tree-4x3-15"])
@pytest.mark.parametrize("local_prefill_tokens", [0, 40])
def test_greedy_output_is_the_likeliest_that_the_grammar_allows(
    local_prefill_tokens: int,
    shape: str | None,
    overlap: bool,
    make_pair: MakePair,
    leaning: Drafted,
    expected: dict[str, list[int]],
) -> None:
    options = PairOptions(overlap=overlap, local_prefill_tokens=local_prefill_tokens, **SHAPES.get(shape or "", {}))
    pair = run(make_pair, leaning, options, has_head=shape is not None)
    for name, token_ids in expected.items():
        assert pair.outcomes[name].token_ids == token_ids, name
    ended = [outcome for outcome in pair.outcomes.values() if outcome.finished]
    assert len(ended) == 2 * len(PROMPTS)
    for name in expected:
        outcome = pair.outcomes[name]
        assert outcome.finished is not None
        if outcome.finished.reason is FinishReason.EOS:
            assert re.fullmatch(LANGUAGES[int(name.split()[0]) % len(LANGUAGES)].regex, text_of(outcome))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("head", "shape"), [("leaning", "chain-4"), ("leaning", "tree-4x3-15"), ("copying_layers", "chain-5")]
)
def test_output_is_the_same_in_every_mode(
    head: str, shape: str, temperature: float, make_pair: MakePair, request: pytest.FixtureRequest
) -> None:
    drafted: Drafted = request.getfixturevalue(head)
    options = PairOptions(**SHAPES[shape])
    cold = replace(options, prefill_caches=False, decode_caches=False, overlap=False)

    def outcomes(options: PairOptions, *, has_head: bool = True, at_once: bool = True) -> InProcessPair:
        return run(
            make_pair,
            drafted,
            options,
            has_head=has_head,
            at_once=at_once,
            temperature=temperature,
            min_tokens=30,
        )

    plain = outcomes(cold, has_head=False, at_once=False)
    modes = {
        "at once": outcomes(options),
        "alone": outcomes(options, at_once=False),
        "without overlap": outcomes(replace(options, overlap=False)),
    }
    for mode, pair in modes.items():
        for name, outcome in plain.outcomes.items():
            assert pair.outcomes[name].token_ids == outcome.token_ids, (mode, name)
    bound = [outcome for name, outcome in modes["at once"].outcomes.items() if name.endswith("bound")]
    assert Counts.of(bound).num_accepted > 0
    assert sum(outcome.finished.timings.num_cached_tokens for outcome in bound if outcome.finished) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_retracted_request_goes_on_in_its_grammar(temperature: float, make_pair: MakePair, leaning: Drafted) -> None:
    def outcomes(decode_tokens: int) -> InProcessPair:
        pair = make_pair(leaning.target, PairOptions(decode_tokens=decode_tokens), draft=leaning.head)
        for number, prompt in enumerate(PROMPTS):
            sampling = sampling_of(2 + number % 2, temperature=temperature, min_tokens=NEW_TOKENS)
            pair.submit(str(number), prompt, replace(sampling, seed=number))
        pair.finish_prefill()
        pair.run()
        return pair

    undisturbed, pair = outcomes(2048), outcomes(128)
    assert undisturbed.decode.load().num_retractions == 0 < pair.decode.load().num_retractions
    for name, outcome in undisturbed.outcomes.items():
        assert pair.outcomes[name].token_ids == outcome.token_ids
        assert len(outcome.token_ids) == NEW_TOKENS


@pytest.mark.parametrize("num_brought", [1, 4])
def test_a_resumed_request_goes_on_in_its_grammar(
    num_brought: int, make_pair: MakePair, leaning: Drafted, expected: dict[str, list[int]]
) -> None:
    pair = make_pair(leaning.target, PairOptions(), draft=leaning.head)
    for number, prompt in enumerate(PROMPTS):
        brought = expected[f"{number} bound"][:num_brought]
        if END_ID not in brought:
            pair.submit(
                f"{number} bound", [*prompt, *brought], sampling_of(number, temperature=0.0), prompt_len=len(prompt)
            )
    pair.run()
    assert len(pair.outcomes) > 4
    for name, outcome in pair.outcomes.items():
        assert [*expected[name][:num_brought], *outcome.token_ids] == expected[name]


FORCED_TEXT = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456A"


@pytest.mark.parametrize(
    ("head", "shape", "num_a_step", "num_brought", "options"),
    [
        ("leaning", "chain-4", 5, 0, {}),
        ("leaning", "chain-4", 5, 0, {"overlap": False}),
        ("leaning", "chain-4", 5, 0, {"local_prefill_tokens": 40}),
        ("leaning", "chain-4", 5, 10, {}),
        ("leaning", "tree-4x3-15", 4, 0, {}),
        ("copying_layers", "chain-5", 6, 0, {}),
    ],
)
def test_what_a_grammar_forces_takes_no_steps_of_its_own(
    head: str,
    shape: str,
    num_a_step: int,
    num_brought: int,
    options: dict[str, Any],
    make_pair: MakePair,
    request: pytest.FixtureRequest,
) -> None:
    """Whatever the head guesses, each step commits as many tokens as it can, beside rows of other requests too."""
    drafted: Drafted = request.getfixturevalue(head)
    pair = make_pair(drafted.target, PairOptions(**SHAPES[shape], **options), draft=drafted.head)
    grammar = Grammar(GrammarKind.REGEX, FORCED_TEXT)
    sampling = replace(sampling_of(0, temperature=0.9), grammar=grammar, max_tokens=80)
    token_ids = [*TOKENIZER.convert_tokens_to_ids(list(FORCED_TEXT)), END_ID]
    brought, expected = token_ids[:num_brought], token_ids[num_brought:]
    prompt = PROMPTS[0]
    outcome = pair.submit("forced", [*prompt, *brought], sampling, prompt_len=len(prompt))
    undrafted = pair.submit("undrafted", [*prompt, *brought], sampling, prompt_len=len(prompt), wants_drafts=False)
    for number, other in enumerate(PROMPTS[1:4], start=1):
        pair.submit(str(number), other, sampling_of(number, temperature=0.0, is_free=number < 3))
    pair.run()
    assert outcome.token_ids == undrafted.token_ids == expected
    assert outcome.finished is not None and undrafted.finished is not None
    counts = outcome.finished.speculation
    num_steps, num_left = divmod(len(expected) - 1, num_a_step)  # the first token comes with the handoff
    assert counts is not None and num_left == 0
    assert counts.num_verify_steps == num_steps
    assert counts.num_forced_tokens == counts.num_accepted_tokens == num_steps * (num_a_step - 1)
    assert counts.drafted_at == counts.accepted_at == (), "the head is judged by what the grammar forced"
    assert undrafted.finished.speculation is None


@pytest.mark.parametrize(
    ("head", "shape", "num_steps"),
    [("leaning", "chain-4", 4), ("leaning", "tree-4x3-15", 5), ("leaning_layers", "chain-4", 4)],
)
def test_the_head_goes_on_after_forced_tokens_as_after_a_prompt(
    head: str, shape: str, num_steps: int, make_pair: MakePair, request: pytest.FixtureRequest
) -> None:
    """The first token that is not forced ends the steps of the others."""
    drafted: Drafted = request.getfixturevalue(head)
    forced = FORCED_TEXT[:20]
    forced_ids = TOKENIZER.convert_tokens_to_ids(list(forced))
    cases = {"forced": (forced, [], 20), "prompt": ("", forced_ids, 0)}
    outcomes = {}
    for name, (text, prompt, num_forced) in cases.items():
        pair = make_pair(drafted.target, PairOptions(**SHAPES[shape]), draft=drafted.head)
        sampling = sampling_of(0, temperature=0.0, min_tokens=num_forced + 60)
        grammar = Grammar(GrammarKind.REGEX, f"{text}[A-Za-z0-6 ]*")
        sampling = replace(sampling, grammar=grammar, max_tokens=num_forced + 60)
        outcomes[name] = pair.submit(name, [*PROMPTS[2], *prompt], sampling)
        pair.run()
    assert outcomes["forced"].token_ids == [*forced_ids, *outcomes["prompt"].token_ids]
    counts = {name: Counts.of([outcome]) for name, outcome in outcomes.items()}
    assert counts["prompt"].num_accepted > 4 and counts["prompt"].num_rejected > 10
    assert counts["forced"].num_steps == num_steps + counts["prompt"].num_steps
    assert counts["forced"].num_accepted == 20 - num_steps + counts["prompt"].num_accepted


def drafting_of(outcome: Outcome) -> SpeculationCounts:
    """Returns what was drafted for a request, without the times."""
    assert outcome.finished is not None and outcome.finished.speculation is not None
    return replace(outcome.finished.speculation, draft_s=0.0, verify_s=0.0, extend_s=0.0)


def test_a_head_of_several_layers_drafts_for_rows_of_mixed_steps_as_for_one_alone(
    make_pair: MakePair, leaning_layers: Drafted
) -> None:
    """Steps have rows with forced drafts, rows under a grammar without any, and free rows."""
    options = PairOptions(**SHAPES["chain-4"])
    together = run(make_pair, leaning_layers, options, min_tokens=30)
    alone = run(make_pair, leaning_layers, options, min_tokens=30, at_once=False)
    plain = run(make_pair, leaning_layers, options, min_tokens=30, at_once=False, has_head=False)
    are_mixed = [
        any(step.speculation.num_forced) and step.masks.num_rows < step.batch_size
        for step in together.decode_steps
        if step.speculation is not None and step.masks is not None
    ]
    assert are_mixed.count(True) > 5
    for name, expected in plain.outcomes.items():
        outcome = together.outcomes[name]
        assert outcome.token_ids == alone.outcomes[name].token_ids == expected.token_ids, name
        counts = drafting_of(outcome)
        assert counts == drafting_of(alone.outcomes[name]), name
        if name.endswith("free"):
            assert counts.num_forced_tokens == 0 < counts.num_accepted_tokens
    keys = [drafting_of(together.outcomes[name]) for name in ("3 bound", "7 bound")]
    assert all(counts.num_forced_tokens >= 4 * (NEW_TOKENS // 8) for counts in keys), "a key has seven forced tokens"


def steps_of_keys(make_pair: MakePair, drafted: Drafted, shape: str, **options: Any) -> tuple[int, list[int]]:
    """Returns how many steps and which tokens a request takes whose grammar has a choice before each key."""
    pair = make_pair(drafted.target, PairOptions(**SHAPES[shape], **options), draft=drafted.head)
    outcome = pair.submit("keys", PROMPTS[3], sampling_of(3, temperature=0.9, min_tokens=NEW_TOKENS))
    pair.run()
    assert outcome.finished is not None and outcome.finished.speculation is not None
    return outcome.finished.speculation.num_verify_steps, outcome.token_ids


@pytest.mark.parametrize(
    ("mutant", "overlap"),
    [(forced_tokens_one_too_far, True), (forced_tokens_one_too_far, False), (nobody_looks_ahead, True)],
)
def test_a_key_takes_fewer_steps_than_tokens_unless_what_is_forced_is_guessed_wrongly(
    mutant: Callable[[pytest.MonkeyPatch], None],
    overlap: bool,
    make_pair: MakePair,
    leaning: Drafted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two steps are enough for a choice and the seven tokens of a key before it. Wrong guesses change no token."""
    num_steps, token_ids = steps_of_keys(make_pair, leaning, "chain-4", overlap=overlap)
    assert num_steps <= 2 * len(token_ids) / 8
    mutant(monkeypatch)
    num_mutants, found = steps_of_keys(make_pair, leaning, "chain-4", overlap=overlap)
    assert found == token_ids
    assert num_mutants > num_steps


def test_an_output_is_no_shorter_than_asked_for_unless_the_grammar_ends(make_pair: MakePair, leaning: Drafted) -> None:
    pair = run(make_pair, leaning, PairOptions(), min_tokens=20)
    for number in range(len(PROMPTS)):
        outcome, language = pair.outcomes[f"{number} bound"], LANGUAGES[number % len(LANGUAGES)]
        if END_ID in outcome.token_ids[:20]:
            assert language.following(text_of(outcome)) == END, "it could have gone on"
        assert outcome.finished is not None


@pytest.mark.parametrize("has_head", [True, False])
def test_a_step_says_what_its_masks_cost(
    has_head: bool, make_pair: MakePair, leaning: Drafted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks are normally computed during the forward. In this test they are computed after it, so the draw waits for
    all of it.
    """
    devices: list[Device] = []
    took: list[tuple[int, float]] = []
    masks_of = scheduler.masks_of

    def new_device() -> Device:
        devices.append(cpu_device())
        return devices[-1]

    def after_the_forward(begun: BegunStep, *args: Any, **options: Any) -> tuple[Mask, list[Request]]:
        while any(stream.is_busy for stream in devices[0].progress()):
            time.sleep(0)
        start_s = time.perf_counter()
        found = masks_of(begun, *args, **options)
        took.append((begun.batch.sampling.constrained.size, time.perf_counter() - start_s))
        return found

    monkeypatch.setattr(scheduler, "masks_of", after_the_forward)
    pair = run(make_pair, leaning, PairOptions(), has_head=has_head, new_device=new_device)
    pair.settle()  # a step may still be in flight
    masks = [step.masks for step in pair.decode_steps if step.masks is not None]
    assert len(masks) == len(took) > 0
    for stats, (num_rows, seconds) in zip(masks, took, strict=True):
        assert stats.num_rows == num_rows
        assert min(stats.mask_s, stats.wait_s) >= seconds
    pair.submit("another", PROMPTS[0], sampling_of(0, temperature=0.0, is_free=True))
    pair.run()
    assert pair.decode_steps[-1].masks is None


def masks_one_row_off(patch: pytest.MonkeyPatch) -> None:
    masks_of = scheduler.masks_of

    def mutant(*args: Any, **options: Any) -> tuple[Mask, list[Request]]:
        masks, failed = masks_of(*args, **options)
        return np.roll(masks, 1, axis=0), failed

    patch.setattr(scheduler, "masks_of", mutant)


def first_token_taken_twice(patch: pytest.MonkeyPatch) -> None:
    take = ResultTaker.take_first_tokens

    def mutant(self: ResultTaker, prebuilt: Any, results: Any) -> None:
        take(self, prebuilt, results)
        self._follow_grammars(prebuilt.sampling.constrained, np.arange(prebuilt.batch_size), prebuilt.reqs, results, {})

    patch.setattr(ResultTaker, "take_first_tokens", mutant)


def masks_of_the_last_step(patch: pytest.MonkeyPatch) -> None:
    """Makes a step's masks from the state that the matchers had before the previous step's tokens."""
    fill_nodes, accept = grammars.fill_nodes, LlgMatcher.accept
    before: dict[LlgMatcher, LlgMatcher] = {}

    def noting(self: LlgMatcher, token_id: int) -> bool:
        before[self] = self.copy()
        return accept(self, token_id)

    def mutant(matcher: LlgMatcher, *args: Any) -> dict[int, str]:
        return fill_nodes(before.get(matcher, matcher), *args)

    patch.setattr(LlgMatcher, "accept", noting)
    patch.setattr(grammars, "fill_nodes", mutant)


@pytest.mark.parametrize("mutant", [masks_one_row_off, first_token_taken_twice, masks_of_the_last_step])
def test_it_is_seen(
    mutant: Callable[[pytest.MonkeyPatch], None],
    make_pair: MakePair,
    leaning: Drafted,
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="differs"):
        check_greedy(make_pair, leaning, expected)


@pytest.mark.parametrize("local_prefill_tokens", [0, 40])
@pytest.mark.parametrize("has_head", [True, False])
def test_a_grammar_that_reaches_a_limit_fails_its_request_alone(
    has_head: bool, local_prefill_tokens: int, make_pair: MakePair, leaning: Drafted
) -> None:
    """The error is the request's own fault. The request is not retried, and no KV is forgotten as damaged."""
    endless = Grammar(GrammarKind.REGEX, "(a{1,1000}){1,1000}")
    options = PairOptions(local_prefill_tokens=local_prefill_tokens)
    pair = make_pair(leaning.target, options, draft=leaning.head if has_head else None)
    failing = [
        pair.submit(
            f"endless {number}",
            PROMPTS[2],
            replace(sampling_of(number, temperature=0.0), grammar=endless, max_tokens=200, min_tokens=200),
            cache_salt="",
        )
        for number in range(2)
    ]
    other = pair.submit("other", PROMPTS[2], sampling_of(1, temperature=0.0), cache_salt="")
    pair.run()
    for outcome in failing:
        assert isinstance(outcome.error, InvalidRequest) and outcome.error.field == "sampling.regex"
        assert 10 < len(outcome.token_ids) < 200
    assert other.finished is not None
    assert pair.decode.load().num_row_retries == 0
    assert pair.decode.load().slots.cached > 0


@pytest.mark.parametrize("fails_at_once", [True, False])
def test_a_limit_that_only_drafts_reach_is_told_as_that(
    fails_at_once: bool, make_pair: MakePair, leaning: Drafted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's limits on one call count what it has not computed before. So a copy that follows the drafts may
    fail where the request's own matcher does not, later.
    """

    class Failing(LlgMatcher):
        has_failed = False

        def accept(self, token_id: int) -> bool:
            self.has_failed = super().accept(token_id)
            return self.has_failed and not fails_at_once

        def fill(self, mask: Mask) -> None:
            mask[:] = 0 if self.has_failed else ALL_ALLOWED

        @property
        def failure(self) -> str:
            return "too large" if self.has_failed else ""

    class Own(LlgMatcher):
        def copy(self) -> Failing:
            return Failing(self._matcher.deep_copy(), self._end_ids, self._work, self._lexer)

    def fill_nodes_of_failing(matcher: LlgMatcher, *args: Any) -> dict[int, str]:
        return fill_nodes(Own(matcher._matcher, matcher._end_ids, matcher._work, matcher._lexer), *args)

    fill_nodes = grammars.fill_nodes
    monkeypatch.setattr(grammars, "fill_nodes", fill_nodes_of_failing)
    pair = make_pair(leaning.target, PairOptions(), draft=leaning.head)
    sampling = replace(sampling_of(0, temperature=0.0), grammar=Grammar(GrammarKind.REGEX, "[a-zA-Z ]*"), max_tokens=60)
    outcome = pair.submit("drafted", PROMPTS[2], sampling, cache_salt="")
    pair.run()
    assert isinstance(outcome.error, InvalidRequest) and outcome.error.field == "sampling.regex", outcome
    assert "too large" in str(outcome.error)


def test_a_grammar_that_reaches_a_limit_at_a_token_is_told_as_that(make_pair: MakePair, leaning: Drafted) -> None:
    wide = Grammar(GrammarKind.LARK, "start: /a/ " + "b? " * 3000 + '\nb: "b"')
    pair = make_pair(leaning.target, PairOptions(), draft=leaning.head)
    failing = pair.submit("wide", PROMPTS[2], replace(sampling_of(0, temperature=0.0), grammar=wide), cache_salt="")
    pair.run()
    assert isinstance(failing.error, InvalidRequest) and failing.error.field == "sampling.lark"
    assert failing.token_ids
