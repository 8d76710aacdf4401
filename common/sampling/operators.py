"""Draws tokens with PyTorch's operators, on any device.

The steps are, in this order: the mask of a grammar, penalties, logit bias and minimum length, temperature, top_k,
top_p, min_p, and argmax with Gumbel noise added. top_p keeps the smallest set of most likely tokens whose probability,
after temperature and top_k, reaches p. min_p then drops tokens that are less likely than min_p times the most likely
one. Log-probabilities are those of the model's unmodified distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.device.stream import Device
from common.device.upload import upload_array
from common.sampling.noise import gumbel_noise, row_keys
from common.sampling.state import Ancestors, DrawKernels, SamplingBatch, SamplingState

_DROPPED = float("-inf")


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest logit of each row. `token_ids` [R] int64 is its first index, or that of the first NaN.

    `are_not_finite` [R] bool says whether this logit is NaN or infinite.
    """

    token_ids: Tensor
    are_not_finite: Tensor

    def first(self, num_rows: int) -> Largest:
        """Returns the largest logits of the first `num_rows` rows only."""
        return Largest(self.token_ids[:num_rows], self.are_not_finite[:num_rows])


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens drawn for a batch. `is_invalid` [B] bool is true if a row had no finite logit to choose; token_ids is
    [B] int64.

    If logprobs were asked for, the other fields have a row for each of the W entries in SamplingBatch.with_logprobs:
    `logprobs` [W] float32, `top_ids` [W, k] int64 and `top_logprobs` [W, k] float32, where k is the most top entries
    that any of them wants. Otherwise they are None.
    """

    token_ids: Tensor
    is_invalid: Tensor
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingState,
    batch: SamplingBatch,
    *,
    masks: Tensor | None = None,
    found: Largest | None = None,
) -> Sampled:
    """Draws each row's token at its position, as `draw` does, and adds it to the row's output counts. Rows must be
    distinct.
    """
    if state.kernels is not None:
        return _draw_by_kernels(state.kernels, logits, rows, positions, state, batch, masks=masks, is_counted=True)
    sampled = draw(logits, rows, positions, state, batch, masks=masks, found=found)
    if batch.penalised.size:
        entries = _index(batch.penalised, logits)
        state.count(rows[entries], sampled.token_ids[entries])
    return sampled


def draw(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingState,
    batch: SamplingBatch,
    ancestors: Ancestors | None = None,
    *,
    masks: Tensor | None = None,
    found: Largest | None = None,
) -> Sampled:
    """Draws each row's token at its position, without counting it as output.

    Shapes: logits [B, vocab] float32 (may be overwritten), rows and positions [B] int64. `rows` are
    the entries' pool rows. A position is the drawn token's own index in the sequence. Penalties count `ancestors`, the
    drafts before the token, as output. `masks` [C, words] int32 has the tokens that grammars allow the C entries in
    `batch.constrained`: bit t % 32 of word t // 32 is that of token t. None means that no entry has one. `found` is the
    largest logit of each row, or None if it is not known. PyTorch's operators take the tokens from it if
    `batch.is_greedy`.
    """
    if state.kernels is not None:
        return _draw_by_kernels(state.kernels, logits, rows, positions, state, batch, ancestors, masks=masks)
    if found is not None and batch.is_greedy:
        return Sampled(found.token_ids, found.are_not_finite)
    with torch.inference_mode():  # entered late: entering it costs as much as a small operation
        return _draw_from(logits, rows, positions, state, batch, ancestors, masks)


def _draw_from(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingState,
    batch: SamplingBatch,
    ancestors: Ancestors | None,
    masks: Tensor | None,
) -> Sampled:
    raw = logits.clone() if batch.with_logprobs.size else logits
    _drop_forbidden(logits, batch, masks)
    shaped = shape_logits(logits, rows, positions, state, batch, ancestors)
    token_ids = largest(shaped)
    is_invalid = _are_not_finite(shaped, token_ids)  # on the largest logit, before top_p, which would hide a NaN
    if batch.sampled.size:
        entries = _index(batch.sampled, logits)
        token_ids[entries] = _draw(shaped, entries, rows, positions, state, batch)
    return _with_logprobs(raw, Sampled(token_ids, is_invalid), batch)


@torch.inference_mode()
def _draw_by_kernels(
    kernels: DrawKernels,
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingState,
    batch: SamplingBatch,
    ancestors: Ancestors | None = None,
    *,
    masks: Tensor | None = None,
    is_counted: bool = False,
) -> Sampled:
    raw = logits.clone() if batch.with_logprobs.size else logits
    _drop_forbidden(logits, batch, masks)
    drawn = kernels.draw(logits, rows, positions, state, ancestors, is_counted=is_counted)
    return _with_logprobs(raw, Sampled(*drawn), batch)


def _drop_forbidden(logits: Tensor, batch: SamplingBatch, masks: Tensor | None) -> None:
    """Drops, in place, the logits [B, vocab] that a grammar forbids. `masks` are those of `draw`."""
    if masks is None:
        return
    entries = _index(batch.constrained, logits)
    logits[entries] = logits[entries].masked_fill_(~_unpacked(masks, logits.shape[1]), _DROPPED)


def _unpacked(masks: Tensor, num_bits: int) -> Tensor:
    """Returns the first `num_bits` bits of each row of `masks` [C, words] int32, lowest first: [C, num_bits] bool."""
    if masks.device.type == "cpu":
        bits = np.unpackbits(masks.numpy().view(np.uint8), axis=1, count=num_bits, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))
    places = torch.arange(32, device=masks.device, dtype=torch.int32)
    return (masks.unsqueeze(2) >> places).bitwise_and_(1).bool().flatten(1)[:, :num_bits]


def _with_logprobs(raw: Tensor, sampled: Sampled, batch: SamplingBatch) -> Sampled:
    """Returns `sampled` with the log-probabilities that `batch` wants, from the model's own logits `raw`."""
    if not batch.with_logprobs.size:
        return sampled
    entries = _index(batch.with_logprobs, raw)
    logprobs = torch.log_softmax(raw[entries], dim=-1)
    chosen = logprobs.gather(1, sampled.token_ids[entries].unsqueeze(1)).squeeze(1)
    top = logprobs.topk(int(batch.num_top_logprobs.max()), dim=-1)
    return Sampled(sampled.token_ids, sampled.is_invalid, chosen, top.indices, top.values)


def largest(logits: Tensor) -> Tensor:
    """Returns the index of the first largest logit of each row of [B, vocab], or of its first NaN: [B] int64."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))  # torch's own argmax takes five times as long
    return logits.argmax(dim=-1)


def _are_not_finite(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Returns whether the logits [B, vocab] at `token_ids` [B] are NaN or infinite: [B] bool."""
    if logits.device.type == "cpu":
        chosen = logits.numpy()[np.arange(token_ids.shape[0]), token_ids.numpy()]
        return torch.from_numpy(~np.isfinite(chosen))  # numpy is faster here, between two forwards
    return ~torch.isfinite(logits.gather(1, token_ids.unsqueeze(1)).squeeze(1))


def shape_logits(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingState,
    batch: SamplingBatch,
    ancestors: Ancestors | None = None,
) -> Tensor:
    """Applies penalties, bias and minimum length to the logits in place, and returns them.

    The arguments are those of `draw`, which chooses tokens from the result.
    """
    if batch.penalised.size:
        entries = _index(batch.penalised, logits)
        counts = state.output_counts[rows[entries]]
        if ancestors is not None:
            counts.scatter_add_(1, ancestors.token_ids[entries], ancestors.counted[entries])
        logits[entries] = _penalise(logits[entries], rows[entries], counts, state)
    if batch.biased.size:
        entries = _index(batch.biased, logits)
        biased_rows = rows[entries]
        logits[entries] = logits[entries].scatter_add(1, state.bias_ids[biased_rows], state.bias_values[biased_rows])
    if batch.min_length.size:
        entries = _index(batch.min_length, logits)
        too_short = (positions[entries] < state.min_position[rows[entries]]).unsqueeze(1)
        end_ids = state.end_ids[rows[entries]]
        selected = logits[entries]
        kept = torch.where(too_short, _DROPPED, selected.gather(1, end_ids))
        logits[entries] = selected.scatter(1, end_ids, kept)
    return logits


def _penalise(logits: Tensor, rows: Tensor, counts: Tensor, state: SamplingState) -> Tensor:
    was_output = counts > 0
    repetition = state.floats["repetition_penalty"][rows].unsqueeze(1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(was_output | state.in_prompt[rows], repeated, logits)
    logits = logits - counts * state.floats["frequency_penalty"][rows].unsqueeze(1)
    return logits - was_output * state.floats["presence_penalty"][rows].unsqueeze(1)


def propose(
    logits: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, batch: SamplingBatch
) -> Tensor:
    """Returns a draft head's guess of the token that `draw` will choose: it applies the same temperature and noise.

    Shapes: logits [B, Vd] float32 (overwritten), token_ids [Vd], the target's ids of the logits' columns; returns ids
    [B] int64.
    """
    if state.kernels is not None:
        return state.kernels.propose(logits, token_ids, rows, positions, state)
    return token_ids[largest(coupled_logits(logits, token_ids, rows, positions, state, batch))]


def propose_branches(
    logits: Tensor,
    token_ids: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingState,
    batch: SamplingBatch,
    *,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """Returns the draft head's `topk` best guesses, best first: ids [B, topk] int64 and probabilities [B, topk]
    float32.

    The arguments are those of `propose`. The probabilities are the softmax of the head's logits with temperature and
    noise applied. They serve only to rank guesses. NaN is replaced by 0, so that in a draft tree no child ranks above
    its parent.
    """
    coupled = coupled_logits(logits, token_ids, rows, positions, state, batch)
    best = coupled.topk(topk, dim=-1)
    probs = (best.values - coupled.logsumexp(dim=-1, keepdim=True)).exp()
    return token_ids[best.indices], probs.nan_to_num(0.0)


def coupled_logits(
    logits: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, batch: SamplingBatch
) -> Tensor:
    """Divides the draft head's logits by the temperature, and adds the noise with which the target's token will be
    drawn.

    Changes and returns `logits` [B, Vd]. Rows of greedy requests are not changed. The arguments are those of `propose`.
    """
    if state.kernels is not None:
        return state.kernels.couple(logits, token_ids, rows, positions, state)
    if batch.sampled.size:
        entries = _index(batch.sampled, logits)
        entry_rows = rows[entries]
        keys = row_keys(state.seed[entry_rows], state.choice_index[entry_rows], positions[entries])
        scaled = logits[entries] / state.floats["temperature"][entry_rows].unsqueeze(1)
        logits[entries] = scaled.add_(gumbel_noise(keys, token_ids))
    return logits


def _draw(
    shaped: Tensor, entries: Tensor, rows: Tensor, positions: Tensor, state: SamplingState, batch: SamplingBatch
) -> Tensor:
    entry_rows = rows[entries]
    scaled = shaped[entries] / state.floats["temperature"][entry_rows].unsqueeze(1)
    if batch.truncated.size:
        truncated = _index(np.searchsorted(batch.sampled, batch.truncated), shaped)
        scaled[truncated] = _truncate(scaled[truncated], entry_rows[truncated], state)
    keys = row_keys(state.seed[entry_rows], state.choice_index[entry_rows], positions[entries])
    return scaled.add_(gumbel_noise(keys, state.token_ids)).argmax(dim=-1)


def _truncate(scaled: Tensor, rows: Tensor, state: SamplingState) -> Tensor:
    """Drops the tokens that options such as top_k exclude, from logits [W, vocab] that were divided by the
    temperature.

    Returns the logits with -inf for dropped tokens. `rows` [W] are the rows in the pool.
    Of equal logits the one with the lower id is kept.
    """
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    kept = rank < state.top_k[rows].unsqueeze(1)
    probs = torch.where(kept, ordered, _DROPPED).softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    kept &= (mass_before < state.floats["top_p"][rows].unsqueeze(1)) | (rank == 0)
    kept &= probs >= probs[:, :1] * state.floats["min_p"][rows].unsqueeze(1)
    return torch.full_like(scaled, _DROPPED).scatter(1, order, torch.where(kept, ordered, _DROPPED))


def _index(entries: NDArray[np.int64], like: Tensor) -> Tensor:
    return upload_array(entries, like.device)


def sampled_to_host(device: Device, sampled: Sampled) -> Sampled:
    """Starts to copy the tensors to the host, and returns the copies.

    Read them only after an event that is recorded later on the current stream.
    """

    def copy(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else device.to_host(tensor)

    return Sampled(
        device.to_host(sampled.token_ids),
        device.to_host(sampled.is_invalid),
        copy(sampled.logprobs),
        copy(sampled.top_ids),
        copy(sampled.top_logprobs),
    )
