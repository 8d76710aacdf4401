"""A draft head whose KV consists of tags, so that any wrong read shows.

The head's KV at position t is a tag of the token after t. From all of this KV and the hidden state, the head reads back
the whole sequence and guesses which token TagModel chooses next. It guesses right two times in three, and never when
something it read was stale, missing or another row's. So the accepted drafts are known beforehand (`drafting_of`), and
any wrong read changes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.attention.backend import ForwardInput
from common.draft.head import DraftOutput, output_of
from common.draft.seed import DraftSeed
from common.kv.layer_group import DRAFT_GROUP, LayerGroupSpec
from common.model.capture import HiddenCapture
from common.sampling.operators import propose, propose_branches
from common.sampling.params import ResolvedSampling
from common.sampling.state import RowStart, SamplingBatch, SamplingState
from decode_service.speculate.spec_info import SpecInfo
from tests.engine.tags import VOCAB_SIZE, attended, forced_after, is_argmax, logits_of, next_of, oracle

DRAFT = LayerGroupSpec(name=DRAFT_GROUP, num_layers=1, num_planes=2, num_heads=1, head_dim=2, dtype="float32")

_VALUES_PER_TOKEN = 4
_IDS = torch.arange(VOCAB_SIZE)
_MAX_CHAIN = 8
_LOST = 0
"""The head's guess when its input makes no sense."""


def draft_kv_of(next_ids: Sequence[int]) -> NDArray[np.float32]:
    """Returns the head's KV of positions 0, 1, ..., where `next_ids[i]` is the token after position i. Shape: [layers,
    planes, tokens, heads, head_dim].
    """
    tags = np.asarray(next_ids) * 512 + np.arange(len(next_ids)) + 1
    values = tags[None, :] - np.arange(_VALUES_PER_TOKEN)[:, None]
    return values.reshape(1, 2, 2, len(tags)).transpose(0, 1, 3, 2)[:, :, :, None, :].astype(np.float32)


def _next_ids(kv: NDArray[np.float32]) -> list[int] | None:
    """Decodes the argument of `draft_kv_of` from KV. None if the KV was not made by it."""
    next_ids = [int(tag - 1) // 512 for tag in kv[0, 0, :, 0, 0]]
    return next_ids if np.array_equal(draft_kv_of(next_ids), kv) else None


def guess_after(token_ids: Sequence[int]) -> int:
    chosen = next_of(tuple(token_ids))
    return chosen if chosen % 3 else (chosen + 1) % VOCAB_SIZE


class TagHead:
    """A DraftHead of tags.

    A hidden state is [token, position, first token of the sequence]. In the target's hidden state the token is the one
    at that position; in the head's own output it is the head's guess.
    """

    algorithm = "eagle"
    layer_group = DRAFT
    capture = HiddenCapture(final=True)
    hidden_size = 3
    dtype = "float32"
    token_ids = _IDS
    feeds_target_hidden = False

    def __init__(self) -> None:
        self.on_forward: Callable[[ForwardInput], None] = lambda batch: None

    def fuse(self, captured: Tensor) -> Tensor:
        return captured

    def forward(self, batch: ForwardInput, hidden: Tensor, *, layer: int = 0) -> Tensor:
        self.on_forward(batch)
        tokens, positions = batch.input_ids.tolist(), batch.positions.tolist()
        for token, position, slot in zip(tokens, positions, batch.out_cache_loc.tolist(), strict=True):
            own = draft_kv_of([0] * position + [token])[:, :, position]
            batch.kv[:, :, slot] = torch.from_numpy(own)
        outputs = []
        for position, (row, columns), state in zip(positions, attended(batch), hidden.tolist(), strict=True):
            kv = batch.kv[:, :, batch.req_to_token[row, columns]].numpy()
            guess = self._guess(kv, position, [int(value) for value in state])
            outputs.append([guess, position, state[2]])
        return torch.tensor(outputs, dtype=torch.float32)

    def _guess(self, kv: NDArray[np.float32], position: int, state: Sequence[int]) -> int:
        known, known_at, first = state
        next_ids = _next_ids(kv)
        if next_ids is None or len(next_ids) != position + 1:
            return _LOST
        sequence = [first, *next_ids]
        is_of_target = known_at == position and known == sequence[position]
        is_own = known_at == position - 1
        return guess_after(sequence) if is_of_target or is_own else _LOST

    def logits(self, hidden: Tensor, *, layer: int = 0) -> Tensor:
        logits = torch.empty((hidden.shape[0], VOCAB_SIZE))
        for row, guess in enumerate(hidden[:, 0].tolist()):
            logits[row] = logits_of(int(guess))
        return logits

    def extend(self, batch: ForwardInput, captured: Tensor) -> DraftOutput:
        return output_of(self, batch, self.fuse(captured))

    def step(self, batch: ForwardInput, hidden: Tensor) -> DraftOutput:
        return output_of(self, batch, hidden)


class _Proposing:
    """Draws the head's proposals for one request."""

    def __init__(self, sampling: ResolvedSampling) -> None:
        self._state = SamplingState(max_rows=1, vocab_size=VOCAB_SIZE, torch_device=torch.device("cpu"))
        self._state.reset([RowStart(1, sampling, 0, (), 0)])
        self._batch = SamplingBatch.of([sampling])
        self._is_argmax = is_argmax(sampling)

    def best(self, token_ids: Sequence[int], *, topk: int) -> tuple[Tensor, Tensor]:
        """Returns the token ids and the probabilities of the head's `topk` best drafts after these tokens, [1, topk]
        each.
        """
        guess = guess_after(token_ids)
        if topk == 1 and self._is_argmax:
            return torch.tensor([[guess]]), torch.ones((1, 1))
        logits = logits_of(guess).unsqueeze(0)
        row, position = torch.tensor([1]), torch.tensor([len(token_ids)])
        if topk == 1:
            drafted = propose(logits, _IDS, row, position, self._state, self._batch)
            return drafted.unsqueeze(1), torch.ones((1, 1))
        return propose_branches(logits, _IDS, row, position, self._state, self._batch, topk=topk)


def first_seed(token_ids: Sequence[int], sampling: ResolvedSampling, *, topk: int) -> DraftSeed:
    """Returns the seed that prefill hands over together with the last token of `token_ids`, which has no KV yet."""
    topk_index, topk_p = _Proposing(sampling).best(token_ids, topk=topk)
    hidden = torch.tensor([[guess_after(token_ids), len(token_ids) - 2, token_ids[0]]], dtype=torch.float32)
    return DraftSeed(topk_index, None if topk == 1 else topk_p, hidden)


@dataclass(frozen=True, slots=True)
class Drafting:
    num_steps: int
    num_accepted: int


def drafting_of(prompt: Sequence[int], sampling: ResolvedSampling, spec_infos: Iterable[SpecInfo]) -> Drafting:
    """Returns the counts of verify steps and accepted tokens of a whole request whose steps draft `spec_infos` in turn.

    They count from prefill's first token to the last token of the request. A step drafts what
    the request's grammar forces after the tokens so far, and then what the head guesses.
    """
    known = [*prompt, *oracle(prompt, sampling.max_tokens + _MAX_CHAIN, sampling)]
    proposing = _Proposing(sampling)
    num_output, num_steps, num_accepted = 1, 0, 0
    for spec_info in spec_infos:
        if num_output >= sampling.max_tokens:
            break
        start = len(prompt) + num_output
        forced = forced_after(known[start - 1]) if sampling.grammar else range(0)
        drafts = _drafts_of(known[:start], forced, proposing, spec_info)
        accepted = 0
        while tuple(known[start : start + accepted + 1]) in drafts:
            accepted += 1
        num_steps += 1
        accepted = min(accepted, sampling.max_tokens - num_output - 1)
        num_accepted += accepted
        num_output += accepted + 1
    return Drafting(num_steps, num_accepted)


def _drafts_of(
    context: list[int], forced: Sequence[int], proposing: _Proposing, spec_info: SpecInfo
) -> set[tuple[int, ...]]:
    """Returns the paths from the root to each draft of a step. Siblings of forced tokens, which are never accepted, are
    left out.
    """
    beams: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    drafts: list[tuple[float, tuple[int, ...]]] = []
    for level in range(spec_info.num_steps):
        level_drafts = []
        for prob, path in beams:
            if level < len(forced):
                level_drafts.append((prob, (*path, forced[level])))
                continue
            ids, probs = proposing.best([*context, *path], topk=spec_info.topk)
            children = zip(ids[0].tolist(), probs[0].tolist(), strict=True)
            level_drafts += [(prob * child_prob, (*path, child)) for child, child_prob in children]
        drafts += level_drafts
        beams = sorted(level_drafts, key=lambda each: -each[0])[: spec_info.topk]
    return {path for _, path in sorted(drafts, key=lambda each: -each[0])[: spec_info.num_draft_tokens]}
