"""Draws tokens with PyTorch's operators, on any device.

The steps are, in this order: the mask of a grammar, penalties, logit bias and minimum length, temperature, top_k,
top_p, min_p, and argmax with Gumbel noise added. top_p keeps the smallest set of most likely tokens whose probability,
after temperature and top_k, reaches p. min_p then drops tokens that are less likely than min_p times the most likely
one. Log-probabilities are those of the model's unmodified distribution.

Noise is counter-based Gumbel noise: a function of seed, choice index, position and token id only. A row's 64-bit key
mixes seed, choice and position, with splitmix64's finaliser after each. Two rounds of a 32-bit mixing function, keyed
by the two halves of the key, then give a token's 32 bits. All of it is integer arithmetic, so every device draws the
same bits, and noise can be drawn for any subset of the vocabulary alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.device.stream import Device
from common.device.upload import upload_array
from common.sampling.params import TokenLogprobs
from common.sampling.state import Ancestors, SamplingBatch, SamplingState

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
        return _draw_from(logits, rows, positions, state, batch, None, masks, is_counted=True)
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

    Shapes: logits [B, vocab] float32 (may be overwritten), rows and positions [B] int64. `rows` are the entries' pool
    rows. A position is the drawn token's own index in the sequence. Penalties count `ancestors`, the drafts before the
    token, as output. `masks` [C, words] int32 has the tokens that grammars allow the C entries in `batch.constrained`:
    bit t % 32 of word t // 32 is that of token t. None means that no entry has a mask. `found` is the largest logit of
    each row, or None if it is not known. PyTorch's operators take the tokens from it if `batch.is_greedy`.
    """
    if state.kernels is None and found is not None and batch.is_greedy:
        return Sampled(found.token_ids, found.are_not_finite)
    return _draw_from(logits, rows, positions, state, batch, ancestors, masks)


@torch.inference_mode()  # not of `draw`: entering it costs as much as a small operation
def _draw_from(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingState,
    batch: SamplingBatch,
    ancestors: Ancestors | None,
    masks: Tensor | None,
    *,
    is_counted: bool = False,
) -> Sampled:
    """Draws as `draw` does. Kernels also count the tokens as output if `is_counted`."""
    raw = logits.clone() if batch.with_logprobs.size else logits
    _drop_forbidden(logits, batch, masks)
    if state.kernels is not None:
        drawn = state.kernels.draw(logits, rows, positions, state, ancestors, is_counted=is_counted)
        return _with_logprobs(raw, Sampled(*drawn), batch)
    shaped = shape_logits(logits, rows, positions, state, batch, ancestors)
    token_ids = largest(shaped)
    is_invalid = _are_not_finite(shaped, token_ids)  # on the largest logit, before top_p, which would hide a NaN
    if batch.sampled.size:
        entries = _index(batch.sampled, logits)
        token_ids[entries] = _draw(shaped, entries, rows, positions, state, batch)
    return _with_logprobs(raw, Sampled(token_ids, is_invalid), batch)


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

    Returns the logits with -inf for dropped tokens. `rows` [W] are the rows in the pool. Among equal logits, lower ids
    are kept first.
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


def unpack_logprobs(sampled: Sampled, batch: SamplingBatch, *, width: int = 1) -> NDArray[np.object_]:
    """Returns [B, width] objects: a TokenLogprobs for each token, or None where the request wants no log-probabilities.

    Each has as many top entries as the request asked for. `sampled` has `width` adjacent tokens for each entry of
    `batch`.
    """
    unpacked = np.full((len(sampled.token_ids) // width, width), None, dtype=np.object_)
    if sampled.logprobs is None or sampled.top_ids is None or sampled.top_logprobs is None:
        return unpacked
    columns = (
        sampled.logprobs.tolist(),
        sampled.top_ids.tolist(),
        sampled.top_logprobs.tolist(),
        batch.num_top_logprobs.repeat(width).tolist(),
    )
    items = [
        TokenLogprobs(chosen, tuple(top_ids[:num_top]), tuple(top_values[:num_top]))
        for chosen, top_ids, top_values, num_top in zip(*columns, strict=True)
    ]
    unpacked[batch.with_logprobs] = np.fromiter(items, np.object_, len(items)).reshape(-1, width)
    return unpacked


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN = _signed(0x9E3779B97F4A7C15, 64)
_MIX64_A = _signed(0xBF58476D1CE4E5B9, 64)
_MIX64_B = _signed(0x94D049BB133111EB, 64)
_MIX32_A = _signed(0x7FEB352D, 32)
_MIX32_B = _signed(0x846CA68B, 32)


def _shift_right(x: Tensor, bits: int, width: int) -> Tensor:
    """Shifts signed integers of `width` bits right and fills with zeros; torch's own operator copies the sign bit."""
    return (x >> bits) & ((1 << (width - bits)) - 1)


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30, 64)) * _MIX64_A
    x = (x ^ _shift_right(x, 27, 64)) * _MIX64_B
    return x ^ _shift_right(x, 31, 64)


def mix32(x: Tensor) -> Tensor:
    """Mixes the bits of 32-bit integers (any shape): each result depends on all bits of its integer, and the mapping is
    one-to-one.
    """
    x = (x ^ _shift_right(x, 16, 32)).mul_(_MIX32_A)
    x ^= _shift_right(x, 15, 32)
    x = x.mul_(_MIX32_B)
    x ^= _shift_right(x, 16, 32)
    return x


def row_keys(seeds: Tensor, choice_indices: Tensor, positions: Tensor) -> Tensor:
    """Returns each row's noise key, from its seed, choice index and absolute token position. All are [B] int64.

    An unsigned 64-bit seed is passed as the int64 with the same bits.
    """
    keys = _mix64(seeds + _GOLDEN)
    keys = _mix64((keys ^ choice_indices) + _GOLDEN)
    return _mix64((keys ^ positions) + _GOLDEN)


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Returns standard Gumbel noise [B, N] float32 for keys [B] and token ids [N] or [B, N].

    The upper tail, which decides the winning token, has a resolution of 2^-33. No value is infinite.
    """
    low = keys.to(torch.int32).unsqueeze(-1)
    high = (keys >> 32).to(torch.int32).unsqueeze(-1)
    bits = mix32(mix32(token_ids.to(torch.int32) ^ low) + high)
    # Read as unsigned, so that the smallest probabilities, which make the largest noise, come from the small patterns
    # that float32 holds exactly; those near 1 round, and stay below it.
    value = bits.to(torch.float32)
    tail = torch.where(value < 0, value + 2.0**32, value).add_(0.5).mul_(2.0**-32)
    return torch.log1p(tail.clamp_(max=1 - 2.0**-24).neg_()).neg_().log_().neg_()
