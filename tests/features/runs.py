"""Runs of the pair that use many features at once. Every request's tokens are compared with those of a pair that uses
none of them but the model's own, one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from baton import Client, Completion
from baton.local_pair import LocalPair
from common.model.loader import KvDtype
from common.sampling.params import ResolvedSampling
from common.telemetry.stats import SpeculationCounts, Timings
from common.wire.handoff import Frame, KvSegment
from tests.features.matrix import Used
from tests.support.conversations import local_chunks_noted
from tests.support.draft_heads import save_copy_head
from tests.support.drafted import load_drafted
from tests.support.languages import LANGUAGES, Language, sampling_of
from tests.support.loading import load_draft, load_target
from tests.support.models import SMALL_VOCAB_SIZE, save_last_token_model
from tests.support.pair import Outcome, PairOptions, pairs_that_keep_all
from tests.support.quantized import QuantizedModel, save_quantized_model
from tests.support.ranked import ranked_model
from tests.support.running_pair import BOUND_S, prefill_counters, running_pair, stopped, wait_until

NUM_SHARED, NEW_TOKENS = 30, 48
_NUM_REQUESTS, _NUM_CHOICES = 9, 3
_CHUNK_TOKENS, _LOCAL_PREFILL_TOKENS = 16, 12
_DECODE_TOKENS = 136
"""Slots of the decode service: too few for all requests at once, so that some are retracted."""
_OF_MODEL = frozenset({"windows", "experts", "quantised weights"})


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of draft head, and the shape of its drafts: the features that these are, the options of `save_copy_head`,
    and PairOptions' settings.
    """

    features: frozenset[str]
    head: Mapping[str, Any]
    drafts: Mapping[str, int]


SHAPES = {
    "chain": Shape(frozenset({"chains of drafts"}), {"family": "eagle3"}, {"num_draft_tokens": 4}),
    "tree": Shape(
        frozenset({"trees of drafts"}),
        {"family": "eagle3"},
        {"draft_topk": 2, "num_draft_steps": 3, "num_draft_tokens": 6},
    ),
    "layers": Shape(
        frozenset({"chains of drafts", "draft heads of several layers"}),
        {"family": "nextn", "num_layers": 4},
        {"num_draft_tokens": 4},
    ),
}


@dataclass(frozen=True, slots=True)
class Models:
    """A target whose layers have windows and experts and whose weights are quantised, with a draft head for each of
    SHAPES. Its tokens depend on all of that, and drafts are often right.
    """

    target: QuantizedModel
    heads: Mapping[str, Path]

    @classmethod
    def save(cls, directory: Path) -> Models:
        source = save_last_token_model(
            directory / "source",
            architecture="qwen3_moe",
            context_weight=0.05,
            mlp_weight=0.05,
            sliding_window=36,  # above the shorter prompts, of which others then share all, and below all contexts
            use_sliding_window=True,
        )
        target = save_quantized_model(directory / "target", "fp8-blocks", source)
        heads = {
            name: save_copy_head(directory / name, target_dir=target.whole_dir, **shape.head)
            for name, shape in SHAPES.items()
        }
        return cls(target, heads)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request. Those of the second `wave` are sent after the first has ended."""

    name: str
    wave: int
    prompt: tuple[int, ...]
    sampling: ResolvedSampling
    language: Language | None
    choice_index: int

    def used(
        self,
        timings: Timings,
        speculation: SpeculationCounts | None,
        shape: Shape,
        *,
        transport: str,
        overlap: bool,
        is_ranked: bool,
        kv_dtype: KvDtype,
    ) -> Used:
        """Returns the features that this request used, if its output is right. `transport` is the one of handoffs."""
        return _OF_MODEL.union(
            self._used(timings, speculation, shape, transport),
            () if overlap else ("no overlap",),
            ("tensor parallelism",) if is_ranked else (),
            ("KV in FP8",) if kv_dtype == "fp8_e4m3" else (),
        )

    def _used(
        self, timings: Timings, speculation: SpeculationCounts | None, shape: Shape, transport: str
    ) -> Iterator[str]:
        if timings.num_cached_tokens:
            yield "prefix reuse"
        if timings.num_handoff_attempts == 0:
            yield "local prompts"
        elif timings.kv_bytes:
            yield transport
        if timings.num_retractions:
            yield "retraction"
        if speculation is not None and 0 < speculation.num_accepted_tokens < speculation.num_drafted_tokens:
            yield from shape.features
        if self.language is not None:
            yield "grammars"
        if self.sampling.num_logprobs is not None:
            yield "log-probabilities"
        if self.choice_index:
            yield "several choices"


def asked() -> Iterator[Asked]:
    """Yields requests whose prompts begin alike. Every third one and the two after it are the choices of one prompt:
    the first is greedy, the others are sampled. The last prompt's choices have no grammar. Every fifth request has no
    log-probabilities. Every second prompt has few tokens after the common beginning.
    """
    for wave in (0, 1):
        for number in range(_NUM_REQUESTS):
            group, choice_index = divmod(number, _NUM_CHOICES)
            tail = range(4 if group % 2 else 20)
            is_free = number >= _NUM_REQUESTS - _NUM_CHOICES
            language = 2 + group % 2
            sampling = sampling_of(
                language,
                temperature=0.8 if choice_index else 0.0,
                is_free=is_free,
                num_logprobs=None if number % 5 == 4 else 2,
                min_tokens=NEW_TOKENS,
            )
            yield Asked(
                f"{wave}-{number}",
                wave,
                (
                    *range(10, 10 + NUM_SHARED),
                    *(4 + (5 * place + 11 * group + 3 * wave) % (SMALL_VOCAB_SIZE - 8) for place in tail),
                ),
                replace(sampling, seed=group, max_tokens=NEW_TOKENS),
                None if is_free else LANGUAGES[language],
                choice_index,
            )


def _longest() -> list[Asked]:
    """Returns two requests that together need more slots than the decode service has, if they share none. Neither has a
    grammar, so nothing is compiled before they are handed over.
    """
    longest = max(len(each.prompt) for each in asked())
    free = [each for each in asked() if each.language is None and not each.choice_index]
    assert [len(each.prompt) for each in free] == [longest] * 2
    assert 2 * longest < _DECODE_TOKENS < 2 * (longest + NEW_TOKENS)
    return free


Logprobs = tuple[float, tuple[int, ...]]
"""The log-probability of a token, and the likeliest tokens there."""

TOLERANCES: dict[KvDtype, float] = {"unquantized": 1e-4, "fp8_e4m3": 5e-3}
"""How far log-probabilities may be apart. In other forwards a number is computed with another last bit. If it lies
between two FP8 numbers, it may be rounded to the other one, and then tokens that attend to it differ by far more.
"""


@dataclass
class Outputs:
    """The tokens of every request, and the log-probabilities of each token if they were asked for."""

    token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    logprobs: dict[str, list[Logprobs]] = field(default_factory=dict)

    def check(self, expected: Outputs, kv_dtype: KvDtype) -> None:
        """Raises AssertionError if an output differs from the expected one."""
        for name, token_ids in expected.token_ids.items():
            assert self.token_ids[name] == token_ids, f"{name}: the tokens differ"
            for (seen, seen_top), (other, other_top) in zip(self.logprobs[name], expected.logprobs[name], strict=True):
                is_close = abs(seen - other) < TOLERANCES[kv_dtype]
                assert is_close and seen_top == other_top, f"{name}: log-probabilities {seen} and {other} differ"

    def check_what_was_asked(self) -> None:
        """Raises AssertionError if an output is not what its request asks for: as many tokens as it may have, all
        allowed by its grammar, with log-probabilities where it wants them, and other tokens than its other choices.
        """
        sampled: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for each in asked():
            token_ids = self.token_ids[each.name]
            assert len(token_ids) == NEW_TOKENS
            assert len(self.logprobs[each.name]) == (NEW_TOKENS if each.sampling.num_logprobs else 0)
            assert all(len(top) == 2 for _, top in self.logprobs[each.name])
            if each.language is not None:
                for place, token_id in enumerate(token_ids):
                    assert token_id in each.language.allowed_after(token_ids[:place]), f"{each.name}: token {place}"
            if each.choice_index:
                sampled.setdefault(each.prompt, set()).add(token_ids)
        assert all(len(choices) == _NUM_CHOICES - 1 for choices in sampled.values()), "two choices are the same"


def _of_outcomes(outcomes: Mapping[str, Outcome]) -> Outputs:
    outputs = Outputs()
    for name, outcome in outcomes.items():
        assert outcome.finished is not None, outcome.error
        outputs.token_ids[name] = tuple(outcome.token_ids)
        outputs.logprobs[name] = [(each.chosen, tuple(each.top_ids)) for each in outcome.logprobs]
    return outputs


def expected_outputs(models: Models, kv_dtype: KvDtype) -> Outputs:
    """Returns the outputs of a plain pair: without a head, caches and overlap, one request at a time.

    With KV in FP8 the decode engine's model is cut as in the runs. Ranks sum in another order, and where a sum is
    rounded to FP8, its last bit can decide.
    """
    target = load_target(models.target.directory, device="cpu", dtype="float32", kv_dtype=kv_dtype)
    with ExitStack() as stack:
        decode_target = target
        if kv_dtype == "fp8_e4m3":
            decode_target, _ = stack.enter_context(ranked_model(models.target.directory, 2, kv_dtype=kv_dtype))
        make_pair = stack.enter_context(pairs_that_keep_all())
        options = PairOptions(overlap=False, prefill_caches=False, decode_caches=False)
        pair = make_pair(decode_target, options, prefill_model=target)
        for each in asked():
            pair.submit(each.name, each.prompt, each.sampling, choice_index=each.choice_index)
            pair.run()
        outputs = _of_outcomes(pair.outcomes)
        outputs.check_what_was_asked()
        return outputs


def _run_here(models: Models, shape_name: str, expected: Outputs, *, overlap: bool, kv_dtype: KvDtype) -> list[Used]:
    """Without overlap, the model of the decode engine is cut between two ranks."""
    with ExitStack() as stack:
        shape = SHAPES[shape_name]
        drafted = load_drafted(models.target.directory, models.heads[shape_name], kv_dtype=kv_dtype)
        target, head = drafted.target, drafted.head
        if not overlap:
            target, _ = stack.enter_context(ranked_model(models.target.directory, 2, kv_dtype=kv_dtype))
            head = load_draft(models.heads[shape_name], target=target, device="cpu", dtype="float32")
            target.capture_hidden(head.capture)
        make_pair = stack.enter_context(pairs_that_keep_all())
        options = PairOptions(
            decode_tokens=_DECODE_TOKENS,
            decode_window_tokens=4 * _DECODE_TOKENS,
            chunk_tokens=_CHUNK_TOKENS,
            local_prefill_tokens=_LOCAL_PREFILL_TOKENS,
            shares_memory=True,
            overlap=overlap,
            **shape.drafts,
        )
        pair = make_pair(target, options, draft=head, prefill_model=drafted.target, prefill_draft=drafted.head)
        num_lent = 0

        def count(frame: Frame) -> Sequence[Frame]:
            nonlocal num_lent
            if isinstance(frame, KvSegment):
                assert frame.shared is not None
                num_lent += 1
            return (frame,)

        pair.tamper = count
        with local_chunks_noted(pair) as chunks:
            for wave in (0, 1):
                for each in asked():
                    if each.wave == wave:
                        pair.submit(
                            each.name, each.prompt, each.sampling, choice_index=each.choice_index, cache_salt=""
                        )
                pair.run()
        _of_outcomes(pair.outcomes).check(expected, kv_dtype)
        assert num_lent > 0 and any(num_running for _, num_running in chunks)
        used = []
        for each in asked():
            end = pair.outcomes[each.name].finished
            assert end is not None
            timings, speculation = end.timings, end.speculation
            used.append(
                each.used(
                    timings,
                    speculation,
                    shape,
                    transport="KV in shared memory",
                    overlap=overlap,
                    is_ranked=not overlap,
                    kv_dtype=kv_dtype,
                )
            )
        return used


def _run_services(
    models: Models, shape_name: str, expected: Outputs, kind: Callable[..., LocalPair], *, kv_dtype: KvDtype
) -> list[Used]:
    shape = SHAPES[shape_name]
    drafts = [f"--{name.replace('_', '-')}={value}" for name, value in shape.drafts.items()]
    topk = [flag for flag in drafts if "topk" in flag]
    overlap = shape_name != "tree"
    outputs, used = Outputs(), []
    with (
        running_pair(
            models.target.directory,
            kind=kind,
            shared_args=(
                f"--draft={models.heads[shape_name]}",
                f"--kv-dtype={kv_dtype}",
                *topk,
                *(() if overlap else ("--disabled-fast-paths=overlap",)),
            ),
            prefill_args=(
                "--kv-transport=nixl",
                f"--chunk-tokens={_CHUNK_TOKENS}",
                "--max-kv-tokens=2048",
            ),
            decode_args=(
                "--tensor-parallel=2",
                f"--max-kv-tokens={_DECODE_TOKENS}",
                f"--local-prefill-tokens={_LOCAL_PREFILL_TOKENS}",
                *(flag for flag in drafts if flag not in topk),
            ),
            hands_all_over=False,
            exposes_metrics=True,
        ) as pair,
        ThreadPoolExecutor(_NUM_REQUESTS) as clients,
    ):

        def note(each: Asked, completion: Completion) -> None:
            outputs.token_ids[each.name] = completion.token_ids
            outputs.logprobs[each.name] = [
                (position.chosen.logprob, tuple(token.token_id for token in position.top))
                for position in completion.logprobs
            ]
            used.append(
                each.used(
                    completion.timings,
                    completion.speculation,
                    shape,
                    transport="KV through NIXL",
                    overlap=overlap,
                    is_ranked=True,
                    kv_dtype=kv_dtype,
                )
            )

        with stopped(*pair.processes.prefill):  # until both have slots for their prompts, and few are left to grow into
            both = [(each, clients.submit(_complete, pair.client, each, cache_salt=each.name)) for each in _longest()]
            wait_until(lambda: pair.load().rows.free == pair.load().rows.total - len(both), about=pair.load)
        for each, completion in both:
            note(each, completion.result())
            assert completion.result().token_ids == expected.token_ids[each.name]
        for wave in (0, 1):
            requests = [each for each in asked() if each.wave == wave]
            for each, completion in zip(requests, clients.map(partial(_complete, pair.client), requests), strict=True):
                note(each, completion)
        counted = prefill_counters(pair)
    assert counted["baton_handoff_bytes_total"] == counted["baton_handoff_lent_bytes_total"] > 0
    assert any({"KV through NIXL", "retraction"} <= each for each in used), "the pool was never short"
    outputs.check(expected, kv_dtype)
    return used


def _complete(client: Client, each: Asked, *, cache_salt: str | None = None) -> Completion:
    sampling = each.sampling
    return client.complete(
        token_ids=each.prompt,
        choice_index=each.choice_index,
        cache_salt=cache_salt,
        timeout_s=BOUND_S,
        temperature=sampling.temperature,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.num_logprobs,
        regex=None if sampling.grammar is None else sampling.grammar.text,
    )


WAYS = ("overlap", "no overlap", "services with NIXL")
"""Ways to serve: two with engines in this process and KV in shared memory, and one with two processes, in which trees
are drafted without overlap. KV is in FP8, and the decode engine's model is cut between two ranks, but not in the first
way.
"""


class Runs:
    """All runs, each of which is made when it is first asked for. `kind` starts services."""

    def __init__(self, directory: Path, *, kind: Callable[..., LocalPair] = LocalPair) -> None:
        self.models = Models.save(directory)
        self._kind = kind
        kv_dtypes: tuple[KvDtype, ...] = ("unquantized", "fp8_e4m3")
        self._expected = {kv_dtype: expected_outputs(self.models, kv_dtype) for kv_dtype in kv_dtypes}
        self._used: dict[tuple[str, str], list[Used]] = {}

    def used(self, way: str, shape_name: str) -> list[Used]:
        """Returns the features that each request of the run used. Raises AssertionError if an output of the run is not
        the expected one.
        """
        key = (way, shape_name)
        kv_dtype: KvDtype = "unquantized" if way == WAYS[0] else "fp8_e4m3"
        expected = self._expected[kv_dtype]
        if key not in self._used:
            self._used[key] = (
                _run_services(self.models, shape_name, expected, self._kind, kv_dtype=kv_dtype)
                if way == "services with NIXL"
                else _run_here(self.models, shape_name, expected, overlap=way == "overlap", kv_dtype=kv_dtype)
            )
        return self._used[key]

    def every(self) -> list[list[Used]]:
        """Returns the features that each request used, by run."""
        return [self.used(way, shape_name) for way in WAYS for shape_name in SHAPES]
