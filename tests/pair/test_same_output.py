"""Tests that an output is the same however its request is served: alone or beside others, with or without overlap,
caches and drafts, computed here or there, retracted or resumed. The output is its tokens, ending and log-probabilities.

The target depends mostly on its last token, but on all others too. So a head that knows the usual next token is often
right and often wrong, and misplaced KV changes the tokens drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from common.attention.backend import ForwardInput
from common.draft.head import DraftOutput, output_of
from common.grammar.grammar import TokenRules
from common.sampling.params import ResolvedSampling
from decode_service.messages import FinishReason
from decode_service.speculate.depth import AdaptiveDepth, FixedDepth
from decode_service.speculate.spec_info import SpecInfo, Unread
from tests.pair import speculation_mutants as mutants
from tests.pair.constraints import LIMITED, RULES_BESIDE_GRAMMARS, Constraint
from tests.support.drafted import SAMPLED, SHAPES, Counts, Drafted, assert_same
from tests.support.languages import LANGUAGES
from tests.support.models import SMALL_VOCAB_SIZE
from tests.support.pair import InProcessPair, MakePair, Outcome, PairOptions, pairs_that_keep_all

thorough = pytest.mark.thorough

NUM_CHOICES = 4
MIXED: tuple[dict[str, Any], ...] = (
    *SAMPLED.values(),
    SAMPLED["top_p"] | SAMPLED["penalties"],
    SAMPLED["min_p"] | SAMPLED["bias"] | SAMPLED["ends"],
    SAMPLED["top_p"] | SAMPLED["penalties"] | SAMPLED["bias"] | SAMPLED["ends"],
)
CONSTRAINTS = (
    *map(Constraint, LANGUAGES),
    *LIMITED,
    *RULES_BESIDE_GRAMMARS,
    Constraint(rules=TokenRules(allowed_ids=tuple(range(0, SMALL_VOCAB_SIZE, 2)))),
    Constraint(rules=TokenRules(forbidden=((9,), (12, 30), (20, 7, 11)))),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. Those with the same `seed` and prompt are choices of one prompt."""

    prompt: list[int]
    sampling: ResolvedSampling
    constraint: Constraint | None = None
    choice_index: int = 0


def asked() -> Mapping[str, Asked]:
    """Returns requests by name: greedy and sampled ones with every combination of options, some under constraints, and
    several choices of one prompt.
    """
    draw = random.Random(17)
    requests: dict[str, Asked] = {}
    for number in range(3 * len(MIXED)):
        sampling = ResolvedSampling(
            seed=draw.getrandbits(64),
            max_tokens=draw.randint(24, 48),
            temperature=(0.0, 0.7, 1.0)[number // len(MIXED)],
            **MIXED[number % len(MIXED)],
        )
        prompt = [draw.randrange(4, SMALL_VOCAB_SIZE) for _ in range(draw.randint(1, 24))]
        requests[f"free {number}"] = Asked(prompt, sampling)
    for number, constraint in enumerate(CONSTRAINTS):
        sampling = constraint.sampling(number, temperature=(0.9, 0.0)[number % 2], min_tokens=20, top_p=0.95)
        prompt = [4 + (7 * number + 3 * place) % 56 for place in range(6 + number)]
        requests[f"bound {number}"] = Asked(prompt, sampling, constraint)
    chosen = ResolvedSampling(seed=1 << 63 | 5, max_tokens=24, temperature=1.2, top_p=0.97)
    for index in (*range(NUM_CHOICES - 1), 127):
        requests[f"choice {index}"] = Asked([9, 33, 17, 60, 21, 42], chosen, choice_index=index)
    return requests


REQUESTS = asked()


def serve(pair: InProcessPair, *, alone: bool = False, brought: Mapping[str, list[int]] | None = None) -> InProcessPair:
    """Sends all requests at once, or one after the other. `brought` is output of an earlier stream, by request."""
    for name, request in REQUESTS.items():
        output = (brought or {}).get(name, [])
        pair.submit(
            name,
            [*request.prompt, *output],
            request.sampling,
            prompt_len=len(request.prompt),
            choice_index=request.choice_index,
            cache_salt="",
        )
        if alone:
            pair.run()
    pair.finish_prefill()
    pair.run()
    return pair


@pytest.fixture(scope="module")
def plain(leaning: Drafted) -> dict[str, Outcome]:
    """The outcomes without overlap, caches and drafts, one request at a time."""
    with pairs_that_keep_all() as make_pair:
        cold = PairOptions(overlap=False, prefill_caches=False, decode_caches=False)
        return serve(make_pair(leaning.target, cold), alone=True).outcomes


def check_outputs(pair: InProcessPair, plain: Mapping[str, Outcome]) -> None:
    for name, expected in plain.items():
        outcome = pair.outcomes[name]
        assert outcome.token_ids == expected.token_ids, f"{name} has other tokens: {outcome.error}"
        assert_same(outcome, expected)


def test_outputs_are_what_was_asked_for(plain: dict[str, Outcome]) -> None:
    for name, request in REQUESTS.items():
        token_ids = plain[name].token_ids
        if request.constraint is not None:
            for place, token_id in enumerate(token_ids):
                assert token_id in request.constraint.allowed_after(token_ids[:place]), f"{name}: token {place}"
        if request.sampling.num_logprobs is not None:
            assert all(len(each.top_ids) == request.sampling.num_logprobs for each in plain[name].logprobs)
    choices = [plain[name].token_ids for name in REQUESTS if name.startswith("choice")]
    assert len({tuple(token_ids) for token_ids in choices}) == NUM_CHOICES
    assert len({token_ids[0] for token_ids in choices}) > 1, "the first token is prefill's"
    reasons = {outcome.finished.reason for outcome in plain.values() if outcome.finished}
    assert reasons == {FinishReason.LENGTH, FinishReason.EOS, FinishReason.STOP_TOKEN}


class ScriptedDepth(FixedDepth):
    """Chooses a random depth for each step. A step leaves a draft seed only if the next step drafts."""

    def __init__(self, deepest: SpecInfo) -> None:
        super().__init__(deepest)
        numbers = random.Random(5)
        self._depths = [numbers.choice((0, 0, *range(deepest.num_steps + 1))) for _ in range(1000)]
        self._deepest = deepest

    def choose(self, *, unread: Unread, num_wanted: int, num_forced: NDArray[np.int64]) -> SpecInfo:
        spec_info = self._deepest.at_depth(self._depths[-1] if num_wanted else 0)
        return spec_info if self._depths[-2] else spec_info.without_seed()

    def launched(self, spec_info: SpecInfo) -> None:
        self._depths.pop()


class OverflowingHead:
    """A head that outputs NaN in every third row of a tree's levels."""

    def __init__(self, head: Any) -> None:
        self._head = head

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def forward(self, batch: ForwardInput, hidden: Tensor, *, layer: int = 0) -> Tensor:
        output: Tensor = self._head.forward(batch, hidden, layer=layer)
        if batch.tree_mask is not None:
            output = output.clone()
            output[::3] = float("nan")
        return output

    def step(self, batch: ForwardInput, hidden: Tensor) -> DraftOutput:
        return output_of(self, batch, hidden)


FEW_SLOTS = {"decode_tokens": 112, "chunk_tokens": 16}
CHAIN, TREE = ("leaning", SHAPES["chain-4"]), ("leaning", SHAPES["tree-4x3-15"])
LAYERS = ("leaning_layers", SHAPES["chain-4"])
MODES: dict[str, tuple[tuple[str, dict[str, Any]] | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "plain, no overlap, chunks of 4": (None, {"overlap": False, "chunk_tokens": 4}),
    "plain, few slots": (None, FEW_SLOTS),
    "plain, few slots, no overlap": (None, {**FEW_SLOTS, "overlap": False}),
    "plain, computed in decode": (None, {"local_prefill_tokens": 40}),
    "plain, without a replica": (None, {"prefill_fallback": True}),
    "chain": (CHAIN, {}),
    "chain, no overlap": (CHAIN, {"overlap": False}),
    "chain, few slots": (CHAIN, FEW_SLOTS),
    "chain, without a replica": (CHAIN, {"prefill_fallback": True, "overlap": False}),
    "chain, any depth": (CHAIN, {"new_depth": ScriptedDepth}),
    "chain, adaptive": (CHAIN, {"new_depth": AdaptiveDepth}),
    "tree": (TREE, {}),
    "tree, few slots": (TREE, {**FEW_SLOTS, "overlap": False}),
    "tree, any depth": (TREE, {"new_depth": ScriptedDepth}),
    "tree of a head that overflows": (("overflowing", SHAPES["tree-4x3-15"]), {}),
    "small tree": (("leaning", SHAPES["tree-2x2-4"]), {"overlap": False}),
    "layers": (LAYERS, {}),
    "layers, any depth": (LAYERS, {"new_depth": ScriptedDepth, "overlap": False}),
    "layers, without a replica": (LAYERS, {"prefill_fallback": True}),
}
"""Ways to serve: the draft head with the shape of its drafts, and what differs from a usual pair."""

IN_GATE = {"plain, few slots", "plain, without a replica", "chain, any depth", "tree", "layers"}


def pair_of(mode: str, make_pair: MakePair, request: pytest.FixtureRequest) -> InProcessPair:
    drafts, others = MODES[mode]
    name, shape = drafts or ("leaning", {})
    drafted: Drafted = request.getfixturevalue("leaning" if name == "overflowing" else name)
    head: Any = OverflowingHead(drafted.head) if name == "overflowing" else drafted.head
    options = PairOptions(**shape, **others)
    pair = make_pair(drafted.target, options, draft=head if drafts else None)
    if options.prefill_fallback:
        pair.replicas[0].lose()
        pair.step_decode()
    return pair


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=[] if mode in IN_GATE else [thorough]) for mode in MODES])
def test_output_is_the_same_in_every_mode(
    mode: str, plain: dict[str, Outcome], make_pair: MakePair, request: pytest.FixtureRequest
) -> None:
    drafts, others = MODES[mode]
    pair = serve(pair_of(mode, make_pair, request))
    check_outputs(pair, plain)
    timings = [outcome.finished.timings for outcome in pair.outcomes.values() if outcome.finished]
    assert pair.decode.load().num_retractions == sum(each.num_retractions for each in timings)
    if "decode_tokens" in others:
        assert pair.decode.load().num_retractions > 0
        num_spared = {each.num_retractions + 1 - each.num_handoff_attempts for each in timings}
        # The step in flight, which still carries a request that gave way, may end it.
        assert num_spared <= ({0, 1} if others.get("overlap", True) else {0})
    num_local = sum(each.num_handoff_attempts == 0 for each in timings)
    if "prefill_fallback" in others:
        assert num_local == len(REQUESTS)
    assert ("local_prefill_tokens" in others or "prefill_fallback" in others) == (num_local > 0)
    if drafts is not None:
        levels = {step.speculation.num_levels for step in pair.decode_steps if step.speculation}
        if others.get("new_depth") is AdaptiveDepth:
            assert len(levels) > 1, "every step was as deep"
            return
        counts = Counts.of(pair.outcomes.values())
        assert min(counts.num_accepted, counts.num_rejected) > 2 * len(REQUESTS), "too few drafts to tell anything"
        assert "new_depth" not in others or levels == set(range(PairOptions(**drafts[1]).spec_info.num_steps + 1))


@pytest.mark.parametrize(
    "mode", ["chain", pytest.param("plain", marks=thorough), pytest.param("plain, few slots", marks=thorough)]
)
def test_a_resumed_request_goes_on_exactly(
    mode: str, plain: dict[str, Outcome], make_pair: MakePair, request: pytest.FixtureRequest
) -> None:
    """The output that it brings counts as output: for its limits, its penalties, its noise and its constraints."""
    brought = {name: outcome.token_ids[: 1 + number % 5] for number, (name, outcome) in enumerate(plain.items())}
    brought = {name: output for name, output in brought.items() if len(output) < len(plain[name].token_ids)}
    pair = serve(pair_of(mode, make_pair, request), brought=brought)
    for name, output in brought.items():
        whole, rest = plain[name], pair.outcomes[name]
        assert [*output, *rest.token_ids] == whole.token_ids, name
        assert [each.top_ids for each in rest.logprobs] == [each.top_ids for each in whole.logprobs[len(output) :]]
        assert rest.finished is not None and whole.finished is not None
        assert rest.finished.reason is whole.finished.reason
        assert rest.finished.num_prompt_tokens == len(REQUESTS[name].prompt)
        assert rest.finished.num_completion_tokens == len(whole.token_ids)
    assert (pair.decode.load().num_retractions > 0) == ("few slots" in mode)


@thorough
@pytest.mark.parametrize(
    ("mutant", "mode"),
    [
        (mutants.target_draws_one_position_early, "chain"),
        (mutants.target_draws_all_tokens_with_one_noise, "chain"),
        (mutants.penalties_skipped_on_draft_rows, "tree"),
        (mutants.bias_skipped_on_draft_rows, "chain"),
        (mutants.min_tokens_skipped_on_draft_rows, "chain"),
        (mutants.top_p_skipped_on_draft_rows, "chain"),
        (mutants.ancestors_not_penalised, "tree"),
        (mutants.rejected_tokens_counted, "chain"),
        (mutants.draft_committed_unverified, "layers"),
        (mutants.token_after_a_refused_draft_committed, "chain"),
        (mutants.accepted_without_its_parent, "tree"),
        (mutants.kv_of_the_path_not_moved, "tree"),
        (mutants.verify_mask_is_causal, "tree"),
    ],
)
def test_it_is_seen(
    mutant: Callable[[pytest.MonkeyPatch], None],
    mode: str,
    plain: dict[str, Outcome],
    make_pair: MakePair,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    pair = serve(pair_of(mode, make_pair, request))
    with pytest.raises(AssertionError, match="has other tokens"):
        check_outputs(pair, plain)
