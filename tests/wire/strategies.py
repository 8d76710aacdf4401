"""Hypothesis strategies for the handoff's values, and the shapes of a small model to draw them for."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import numpy as np
from hypothesis import strategies as st

from common.errors import RowFailure
from common.grammar.grammar import Grammar, GrammarKind, TokenRules
from common.grammar.reasoning import Reasoning
from common.kv.layer_group import LayerGroupSpec, SeedColumnSpec
from common.priority import WORST_PRIORITY
from common.sampling.params import NUMBER_OPTIONS, NumberOption, ResolvedSampling, TokenLogprobs
from common.sampling.prompt_logprobs import PromptLogprobs
from common.wire.codec_fingerprint import PROTOCOL_VERSION
from common.wire.fingerprint import Fingerprint
from common.wire.handoff import (
    MAX_CACHE_SALT_CHARS,
    MAX_CLIENT_CHARS,
    Accepted,
    HandoffRow,
    KvSegment,
    PrebuiltBatch,
    RowFailed,
    RowLogprobs,
)

VOCAB_SIZE = 300
TARGET = LayerGroupSpec("target", num_layers=3, num_planes=2, num_heads=2, head_dim=4, dtype="bfloat16")
DRAFT = LayerGroupSpec("draft", num_layers=1, num_planes=2, num_heads=1, head_dim=4, dtype="float32")
SEED_COLUMNS = (
    SeedColumnSpec("topk_p", "float32", (4,)),
    SeedColumnSpec("topk_index", "int64", (4,)),
    SeedColumnSpec("hidden_states", "float16", (8,)),
)
PLAIN = Fingerprint(
    protocol_version=PROTOCOL_VERSION,
    config_digest="c0ffee",
    target_weights_digest="beef",
    tokenizer_digest="7e57",
    dtype="float32",
    layer_groups=(TARGET,),
)
SPECULATIVE = Fingerprint(
    protocol_version=PROTOCOL_VERSION,
    config_digest="c0ffee",
    target_weights_digest="beef",
    tokenizer_digest="7e57",
    dtype="float32",
    layer_groups=(TARGET, DRAFT),
    draft_weights_digest="d4af",
    algorithm="eagle",
    seed_columns=SEED_COLUMNS,
)

_printable = st.text(max_size=8).filter(str.isprintable)
"""Text that arrives unchanged. Other characters are escaped on the way."""
_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
_uint32 = st.integers(0, 2**32 - 1)
_uint64 = st.integers(0, 2**64 - 1)
token_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12).map(tuple)


def number(option: NumberOption) -> st.SearchStrategy[float]:
    """Returns a strategy for values of the option that survive the wire, where floats are float32."""
    if option.kind is int:
        return st.integers(int(option.low), int(option.high))
    low = float(np.nextafter(np.float32(option.low), np.float32(1))) if option.low > 0 else option.low
    return st.floats(low, option.high, width=32)


grammars = st.builds(
    Grammar, st.sampled_from([kind for kind in GrammarKind if kind is not GrammarKind.CHOICE]), st.text(max_size=8)
) | st.lists(st.text(max_size=4), max_size=4).map(Grammar.of_choices)

reasoning = st.builds(
    Reasoning,
    start=st.text(min_size=1, max_size=32).filter(lambda text: not text[0].isspace()),
    end=st.text(min_size=1, max_size=32),
    is_open=st.booleans(),
    max_tokens=st.none() | _uint32,
)

_token_rules = st.none() | st.builds(
    TokenRules,
    allowed_ids=st.sets(_uint32, max_size=4).map(lambda ids: tuple(sorted(ids))),
    forbidden=st.lists(st.lists(_uint32, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
).filter(lambda rules: rules != TokenRules())

sampling = st.builds(
    ResolvedSampling,
    seed=_uint64,
    max_tokens=st.integers(0, 2**32 - 1),
    stop_token_ids=st.lists(_uint32, max_size=4).map(tuple),
    eos_token_ids=st.lists(_uint32, max_size=4).map(tuple),
    logit_bias=st.dictionaries(_uint32, _float32, max_size=4).map(lambda bias: tuple(sorted(bias.items()))),
    num_logprobs=st.none() | st.integers(0, 64),
    num_prompt_logprobs=st.none() | st.integers(0, 64),
    grammar=st.none() | grammars,
    reasoning=st.none() | reasoning,
    token_rules=_token_rules,
    **{name: number(option) for name, option in NUMBER_OPTIONS.items()},
)


@st.composite
def handoff_rows(draw: st.DrawFn) -> HandoffRow:
    ids = draw(token_ids)
    return HandoffRow(
        request_id=draw(_printable.filter(bool)),
        attempt=draw(_uint32),
        choice_index=draw(_uint32),
        token_ids=ids,
        prompt_len=draw(st.integers(1, len(ids))),
        sampling=draw(sampling),
        time_left_ms=draw(_uint64),
        traceparent=draw(st.text(max_size=8)),
        num_held_tokens=draw(st.sampled_from(((), (("draft", 0), ("target", 0)), (("target", len(ids) - 1),)))),
        cache_salt=draw(st.none() | st.text(max_size=MAX_CACHE_SALT_CHARS)),
        priority=draw(st.integers(-WORST_PRIORITY, WORST_PRIORITY)),
        client=draw(st.text(max_size=MAX_CLIENT_CHARS)),
    )


@st.composite
def segments(draw: st.DrawFn, rows: tuple[HandoffRow, ...], fingerprint: Fingerprint) -> KvSegment:
    group = draw(st.sampled_from(fingerprint.layer_groups))
    row = draw(st.integers(0, len(rows) - 1))
    layer_start = draw(st.integers(0, group.num_layers - 1))
    num_layers = draw(st.integers(1, group.num_layers - layer_start))
    token_start = draw(st.integers(0, len(rows[row].token_ids) - 1))
    num_tokens = draw(st.integers(1, len(rows[row].token_ids) - token_start))
    num_bytes = num_layers * group.num_planes * num_tokens * group.row_bytes
    payload = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).bytes(num_bytes)
    return KvSegment(row, group.name, layer_start, num_layers, token_start, num_tokens, payload)


@st.composite
def prebuilt_batches(draw: st.DrawFn, rows: tuple[HandoffRow, ...], fingerprint: Fingerprint) -> PrebuiltBatch:
    indices = draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=len(rows), unique=True))
    size = len(indices)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return PrebuiltBatch(
        rows=np.array(indices, np.int64),
        seq_lens=np.array([len(rows[index].token_ids) for index in indices], np.int64),
        first_token_ids=rng.integers(0, VOCAB_SIZE, size),
        bytes_sent={group.name: rng.integers(0, 2**63 - 1, size) for group in fingerprint.layer_groups},
        queue_s=rng.random(size),
        compute_s=rng.random(size),
        num_cached_tokens=rng.integers(0, [len(rows[index].token_ids) + 1 for index in indices]),
        first_token_logprobs=tuple(_logprobs(rows[index], rng) for index in indices),
        seed_columns={
            column.name: rng.integers(0, 9, (size, *column.row_shape)).astype(column.dtype)
            for column in fingerprint.seed_columns
        },
    )


@st.composite
def row_logprobs(draw: st.DrawFn, rows: tuple[HandoffRow, ...]) -> RowLogprobs:
    """Draws the log-probabilities of one of the rows that ask for them. There must be such a row."""
    row = draw(st.sampled_from([index for index, row in enumerate(rows) if _is_scored(row)]))
    start = draw(st.integers(1, rows[row].prompt_len - 1))
    size = draw(st.integers(1, rows[row].prompt_len - start))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (size, rows[row].sampling.num_prompt_logprobs or 0)
    return RowLogprobs(
        row,
        PromptLogprobs(
            start,
            -rng.random(size, np.float32),
            rng.integers(1, VOCAB_SIZE + 1, size),
            rng.integers(0, VOCAB_SIZE, shape),
            -rng.random(shape, np.float32),
        ),
    )


def _is_scored(row: HandoffRow) -> bool:
    return row.sampling.num_prompt_logprobs is not None and row.prompt_len > 1


def _logprobs(row: HandoffRow, rng: np.random.Generator) -> TokenLogprobs | None:
    num_top = row.sampling.num_logprobs
    if num_top is None:
        return None
    values = (-rng.random(num_top + 1)).astype(np.float32).tolist()
    return TokenLogprobs(values[0], tuple(rng.integers(0, VOCAB_SIZE, num_top).tolist()), tuple(values[1:]))


rows_of_a_call = st.lists(handoff_rows(), min_size=1, max_size=4).map(tuple)
fingerprints = st.sampled_from((PLAIN, SPECULATIVE))


@st.composite
def frames(draw: st.DrawFn, rows: tuple[HandoffRow, ...], fingerprint: Fingerprint) -> object:
    return draw(
        st.builds(Accepted, instance_id=_printable.filter(bool))
        | segments(rows, fingerprint)
        | prebuilt_batches(rows, fingerprint)
        | (row_logprobs(rows) if any(map(_is_scored, rows)) else st.nothing())
        | st.builds(
            RowFailed,
            row=st.integers(0, len(rows) - 1),
            reason=st.sampled_from(RowFailure),
            retryable=st.booleans(),
            retry_after_ms=_uint32,
            message=_printable,
        )
    )


def comparable(value: object) -> object:
    """Replaces numpy arrays in `value` by something that `==` compares, including dtype and shape."""
    if isinstance(value, np.ndarray) and value.dtype == np.uint8:
        return value.tobytes()  # a payload, which is bytes too
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tolist())
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), {member.name: comparable(getattr(value, member.name)) for member in fields(value)})
    if isinstance(value, dict):
        return {key: comparable(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(map(comparable, value))
    if isinstance(value, Exception):
        return (type(value), value.args, vars(value))
    return value
