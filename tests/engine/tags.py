"""A model whose KV consists of tags, so that any wrong read shows.

A token's KV is a tag of the token and its position. The model writes its input's tag, and chooses the next token by a
hash of its input and of all tags it reads through the row's table. So any stale, missing or foreign read gives another
token than `oracle`, which computes sequentially and without slots, rows, batches or streams. A model with a window
reads the last tags a second time, through the window's table, and chooses the same tokens if both reads agree.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.attention.backend import ForwardInput
from common.attention.torch_attention import TorchAttention
from common.grammar.grammar import Grammar, GrammarKind
from common.grammar.matcher import Mask, mask_of, num_words
from common.kv.layer_group import LayerGroupSpec, WindowLayers
from common.model.forward_program import OnLayerKv
from common.model.target import TargetModel, TargetOutput
from common.sampling.operators import sample
from common.sampling.params import ResolvedSampling
from common.sampling.state import RowStart, SamplingBatch, SamplingState

VOCAB_SIZE = 1021
CONTEXT_TOKENS = 64
GROUP = LayerGroupSpec(name="target", num_layers=2, num_planes=2, num_heads=1, head_dim=2, dtype="float32")
WINDOW = WindowLayers(replace(GROUP, name="target_3", window=3), (2, 3))

_VALUES_PER_TOKEN = GROUP.num_layers * GROUP.num_planes * GROUP.head_dim
_WEIGHTS = np.random.default_rng(7).integers(1, 1 << 62, size=(2 * CONTEXT_TOKENS, _VALUES_PER_TOKEN))
_HIGH_BITS = 20
_WINDOW_TOKENS = WINDOW.group.window or 0


def kv_of(token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Returns the KV of tokens 0, 1, ... of a sequence: [layers, planes, tokens, heads, head_dim]."""
    tags = np.asarray(token_ids) * 512 + np.arange(len(token_ids)) + 1
    values = tags[None, :] + np.arange(_VALUES_PER_TOKEN)[:, None]
    per_layer = values.reshape(GROUP.num_layers, GROUP.num_planes, GROUP.head_dim, len(tags))
    return per_layer.transpose(0, 1, 3, 2)[:, :, :, None, :].astype(np.float32)


def choose(kv: NDArray[np.float32], input_token: int) -> int:
    """Returns the token that follows KV [layers, planes, tokens, heads, head_dim] when the last input was
    `input_token`.
    """
    num_tokens = kv.shape[2]
    values = kv[:, :, :, 0, :].transpose(2, 0, 1, 3).reshape(num_tokens, -1).astype(np.int64)
    mixed = int(((values + 1) * _WEIGHTS[:num_tokens]).sum()) + num_tokens * 7919 + input_token * 104729
    return int((mixed >> _HIGH_BITS) % VOCAB_SIZE)


@cache
def next_of(token_ids: tuple[int, ...]) -> int:
    """Returns the token that follows a whole sequence."""
    return choose(kv_of(token_ids), token_ids[-1])


_IDS = torch.arange(VOCAB_SIZE, dtype=torch.float32)
_LOGITS = (3 * torch.cos(torch.outer(_IDS + 1, _IDS))).fill_diagonal_(4.0)


def logits_of(chosen: int) -> Tensor:
    """Returns logits [vocab]: 4 for the chosen token, between -3 and 3 for the others."""
    return _LOGITS[chosen].clone()


def is_argmax(sampling: ResolvedSampling) -> bool:
    """Returns whether these options always draw the chosen token, whatever the noise: greedy decoding without any
    further processing.
    """
    return sampling == ResolvedSampling(seed=sampling.seed, max_tokens=sampling.max_tokens, temperature=0.0)


TAG_GRAMMAR = Grammar(GrammarKind.REGEX, "tags")
"""The grammar of TagMatcher. It stands for any grammar."""


_RUN = range(1, 6)


def forced_after(last: int) -> range:
    """The tokens that TAG_GRAMMAR forces after the token `last`: a run upwards, from 1 to 6 above a multiple of 16."""
    return range(last + 1, last - last % 16 + _RUN.stop + 1) if last % 16 in _RUN else range(0)


class TagMatcher:
    """A Matcher that forces some runs of tokens, and elsewhere forbids a third of all tokens. Which ones depends on the
    token before, in the prompt or the output.
    """

    failure = ""

    def __init__(self, last: int) -> None:
        self._last = last

    def copy(self) -> TagMatcher:
        return TagMatcher(self._last)

    def accept(self, token_id: int) -> bool:
        run = forced_after(self._last)
        is_allowed = token_id == run[0] if run else (self._last + token_id) % 3 != 0
        if not is_allowed:
            return False
        self._last = token_id
        return True

    def fill(self, mask: Mask) -> None:
        mask[:] = _mask_after(self._last)

    def forced(self) -> Sequence[int]:
        return forced_after(self._last)


def _mask_after(last: int) -> Mask:
    run = forced_after(last)
    return mask_of(run[:1], VOCAB_SIZE) if run else _TAG_MASKS[last % 3]


def _two_thirds_after(last: int) -> Mask:
    bits = np.zeros(num_words(VOCAB_SIZE) * 32, np.bool_)
    bits[:VOCAB_SIZE] = (last + np.arange(VOCAB_SIZE)) % 3 != 0
    return np.packbits(bits, bitorder="little").view(np.int32)


_TAG_MASKS = [_two_thirds_after(last) for last in range(3)]


def oracle(token_ids: Sequence[int], num_tokens: int, sampling: ResolvedSampling) -> list[int]:
    """Returns the `num_tokens` tokens that follow `token_ids`, computed one at a time in a batch of one."""
    if is_argmax(sampling):
        sequence = list(token_ids)
        for _ in range(num_tokens):
            sequence.append(next_of(tuple(sequence)))
        return sequence[len(token_ids) :]
    state = SamplingState(max_rows=1, vocab_size=VOCAB_SIZE, torch_device=torch.device("cpu"))
    state.reset([RowStart(1, sampling, 0, tuple(token_ids), len(token_ids))])
    batch = SamplingBatch.of([sampling])
    sequence = list(token_ids)
    for _ in range(num_tokens):
        logits = logits_of(next_of(tuple(sequence))).unsqueeze(0)
        masks = None if sampling.grammar is None else torch.from_numpy(_mask_after(sequence[-1])).unsqueeze(0)
        drawn = sample(logits, torch.tensor([1]), torch.tensor([len(sequence)]), state, batch, masks=masks)
        sequence.append(int(drawn.token_ids[0]))
    return sequence[len(token_ids) :]


def attended(batch: ForwardInput) -> list[tuple[int, list[int]]]:
    """Returns, for each token of the forward, its row and the columns of the row's tables that it attends to, in order
    of position.
    """
    rows, seq_lens = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
    if batch.extend_lens is None:
        return [(row, list(range(seq_len))) for row, seq_len in zip(rows, seq_lens, strict=True)]
    places = []
    start = 0
    for row, seq_len, extend_len in zip(rows, seq_lens, batch.extend_lens, strict=True):
        if batch.tree_mask is None:
            masks = np.tri(extend_len, dtype=np.bool_)
        else:
            masks = np.array(batch.tree_mask[start : start + extend_len].tolist(), np.bool_)
        num_before = seq_len - masks.shape[1]
        places += [(row, [*range(num_before), *(num_before + np.flatnonzero(mask)).tolist()]) for mask in masks]
        start += extend_len
    return places


def _read(batch: ForwardInput, row: int, columns: list[int]) -> NDArray[np.float32]:
    """Returns the KV of the tokens in these columns of a row: [layers, planes, tokens, heads, head_dim].

    If a window's KV differs from the other, values are returned that are in neither.
    """
    kv = batch.kv[:, :, batch.req_to_token[row, columns]].numpy()
    for window in batch.windows:
        last = columns[-_WINDOW_TOKENS:]
        in_window = window.kv[:, :, window.req_to_token[row, last]].numpy()
        kv[:, :, -len(last) :] += 3 * (in_window - kv[:, :, -len(last) :])
    return kv


@dataclass(frozen=True, slots=True)
class SeenForward:
    """The values that one forward read, and weak references to the tensors that its step handed to the stream."""

    input_ids: list[int]
    rows: list[int]
    seq_lens: list[int]
    handed: list[weakref.ref[Tensor]]


class TagModel:
    """A stand-in for TargetModel, with its attributes, that computes with tags."""

    layer_group = GROUP
    num_layers = TargetModel.num_layers
    layer_groups = TargetModel.layer_groups
    parts_of = TargetModel.parts_of
    share = TargetModel.share
    pool_tensors = TargetModel.pool_tensors
    recorder = TargetModel.recorder
    _followers = None
    vocab_size = VOCAB_SIZE
    max_context_tokens = CONTEXT_TOKENS
    eos_token_ids: tuple[int, ...] = ()
    hidden_size = 3
    dtype = torch.float32
    torch_device = torch.device("cpu")
    attention = TorchAttention()

    def __init__(self, windows: tuple[WindowLayers, ...] = ()) -> None:
        self.windows = windows
        self.forwards: list[SeenForward] = []
        self.fails_next = self.fails_to_prepare = False
        self.on_forward: Callable[[ForwardInput], None] = lambda batch: None

    def prepare(self, batch: ForwardInput) -> Callable[[], TargetOutput]:
        if self.fails_to_prepare:
            self.fails_to_prepare = False
            raise MemoryError("no room")
        return partial(self.forward, batch)

    def forward(self, batch: ForwardInput, *, on_layer_kv: OnLayerKv | None = None) -> TargetOutput:
        if self.fails_next:
            self.fails_next = False
            raise ValueError("no kernel")
        tokens, positions = batch.input_ids.tolist(), batch.positions.tolist()
        handed = [batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc]
        if batch.is_decode:
            handed.append(batch.positions)  # the forward itself makes a window's positions
        references = [weakref.ref(tensor) for tensor in handed]
        seen = SeenForward(tokens, batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), references)
        self.forwards.append(seen)
        self.on_forward(batch)
        written = [(batch.kv, batch.out_cache_loc)]
        written += [(window.kv, window.slot_of[batch.out_cache_loc]) for window in batch.windows]
        for kv, slots in written:
            for token, position, slot in zip(tokens, positions, slots.tolist(), strict=True):
                own = kv_of([0] * position + [token])[:, :, position]
                kv[:, :, slot] = torch.from_numpy(own)
        for tell in (on_layer_kv or {}).values():
            tell()
        logits, states = [], []
        for token, position, (row, columns) in zip(tokens, positions, attended(batch), strict=True):
            tags = _read(batch, row, columns)
            logits.append(logits_of(choose(tags, token)))
            states.append([token, position, (int(tags[0, 0, 0, 0, 0]) - 1) // 512])
        wanted = torch.stack(logits) if batch.logits_rows is None else torch.stack(logits)[batch.logits_rows]
        return TargetOutput(wanted, torch.tensor(states, dtype=torch.float32))
