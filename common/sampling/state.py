"""What sampling remembers of each request, in tables addressed by pool row.

Only the forward stream writes them: a row is seeded at bootstrap and counted when a token is drawn. Nothing depends on
a row's place in a batch, so merges and filters have nothing to keep aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.device.upload import upload
from common.sampling.params import (
    MAX_END_TOKEN_IDS,
    MAX_LOGIT_BIAS_ENTRIES,
    NUMBER_OPTIONS,
    ResolvedSampling,
)


@dataclass(frozen=True, slots=True)
class Ancestors:
    """Tokens between a row's output so far and the token to draw: drafted, and not in its counts.

    Shapes: token_ids [B, A] int64; counted [B, A] int32, 1 where the entry is an ancestor and 0 where it fills up.
    """

    token_ids: Tensor
    counted: Tensor


class DrawKernels(Protocol):
    """Kernels that do in one launch what sampling.py does, by what SamplingState holds of each row. The arguments are
    those of `draw`, `propose` and `propose_branches` there.
    """

    def draw(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        state: SamplingState,
        ancestors: Ancestors | None,
        *,
        is_counted: bool,
    ) -> tuple[Tensor, Tensor]:
        """Token ids [B] int64, and which rows of `logits` [B, vocab], overwritten, hold no finite largest, bool [B].

        `is_counted`: whether tokens are added to the counts of the rows that penalise them; rows are then distinct.
        """

    def propose(
        self, logits: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, state: SamplingState
    ) -> Tensor:
        """Target ids [B] int64 that a draft would choose."""

    def couple(
        self, logits: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, state: SamplingState
    ) -> Tensor:
        """A draft's logits [B, Vd] with temperature and noise; `logits` are overwritten."""


@dataclass(frozen=True, slots=True)
class RowSeed:
    """The initial sampling state of a row. `token_ids` past `prompt_len` are output."""

    row: int
    sampling: ResolvedSampling
    choice_index: int
    token_ids: tuple[int, ...]
    prompt_len: int


class SamplingState:
    """Tables of max_rows + 1 rows on the device; row 0 is padding.

    `in_prompt` bool and `output_counts` int32 [rows, vocab]; the numeric columns [rows], strided, of which `floats` has
    those of FLOAT_OPTIONS by name; bias and end ids
    padded to fixed widths (a padded bias entry adds 0 to token 0, a padded end id repeats the first). `num_bias` and
    `num_ends` count those that are not padding; what else is in a row may be an earlier request's. `kernels` draw where
    there are any.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        vocab_size: int,
        torch_device: torch.device,
        kernels: DrawKernels | None = None,
    ) -> None:
        rows = max_rows + 1
        self.kernels = kernels

        def column(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((rows, *shape), dtype=dtype, device=torch_device)

        self.vocab_size = vocab_size
        self._int_params = column(torch.int64, 6)  # separate tables, because two operations write a row
        self._float_params = column(torch.float32, len(FLOAT_OPTIONS))
        self.seed, self.choice_index, self.min_position, self.top_k = self._int_params[:, :4].unbind(1)
        self.num_bias, self.num_ends = self._int_params[:, 4:].unbind(1)
        self.floats = dict(zip(FLOAT_OPTIONS, self._float_params.unbind(1), strict=True))
        for name, values in self.floats.items():
            values.fill_(NUMBER_OPTIONS[name].default)  # padding draws as if nothing were asked for,
        self.floats["temperature"].zero_()  # and greedily
        self.bias_ids = column(torch.int64, MAX_LOGIT_BIAS_ENTRIES)
        self.bias_values = column(torch.float32, MAX_LOGIT_BIAS_ENTRIES)
        self.end_ids = column(torch.int64, MAX_END_TOKEN_IDS)
        self.in_prompt = column(torch.bool, vocab_size)
        self.output_counts = column(torch.int32, vocab_size)
        self.token_ids = torch.arange(vocab_size, dtype=torch.int64, device=torch_device)

    def reset(self, seeds: Sequence[RowSeed]) -> None:
        """Forget the rows' earlier requests and start these. Runs on the forward stream."""
        device = self.seed.device
        rows = upload([seed.row for seed in seeds], torch.int64, device)
        self._int_params[rows] = upload([self._int_params_of(seed) for seed in seeds], torch.int64, device)
        self._float_params[rows] = upload([_float_params_of(seed.sampling) for seed in seeds], torch.float32, device)
        for seed in seeds:
            self._reset_ragged(seed, device)

    def _int_params_of(self, seed: RowSeed) -> tuple[int, ...]:
        """In the order of the columns."""
        sampling = seed.sampling
        signed = sampling.seed - (1 << 64) if sampling.seed >> 63 else sampling.seed
        top_k = min(sampling.top_k, self.vocab_size) if sampling.top_k else self.vocab_size
        min_position = seed.prompt_len + sampling.min_tokens
        num_ends = len(sampling.end_token_ids) if sampling.min_tokens else 0
        return signed, seed.choice_index, min_position, top_k, len(sampling.logit_bias), num_ends

    def _reset_ragged(self, seed: RowSeed, device: torch.device) -> None:
        sampling, row = seed.sampling, seed.row
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias, strict=True)
            self.bias_ids[row].zero_()
            self.bias_values[row].zero_()
            self.bias_ids[row, : len(ids)] = upload(ids, torch.int64, device)
            self.bias_values[row, : len(ids)] = upload(values, torch.float32, device)
        if sampling.min_tokens and sampling.end_token_ids:
            ends = sampling.end_token_ids
            padded = [*ends, *ends[:1] * (MAX_END_TOKEN_IDS - len(ends))]
            self.end_ids[row] = upload(padded, torch.int64, device)
        if sampling.has_penalties:
            tokens = upload(seed.token_ids, torch.int64, device)
            self.in_prompt[row].zero_()
            self.in_prompt[row].index_fill_(0, tokens[: seed.prompt_len], True)
            output = tokens[seed.prompt_len :]
            self.output_counts[row].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def count(self, rows: Tensor, token_ids: Tensor) -> None:
        """Add one drawn token to each row's output counts. Shapes: both [B] int64, rows distinct."""
        self.output_counts[rows, token_ids] += 1

    def count_runs(self, rows: Tensor, token_ids: Tensor, is_counted: Tensor) -> None:
        """Add a run of tokens to each row's output counts. Shapes: rows [B], token_ids and is_counted (bool) [B, M]."""
        each_row = rows.unsqueeze(1).expand_as(token_ids)
        self.output_counts.index_put_((each_row, token_ids), is_counted.to(torch.int32), accumulate=True)


FLOAT_OPTIONS = tuple(name for name, option in NUMBER_OPTIONS.items() if option.kind is float)
"""The columns of `SamplingState.floats`, in their order."""


def _float_params_of(sampling: ResolvedSampling) -> tuple[float, ...]:
    return tuple([getattr(sampling, name) for name in FLOAT_OPTIONS])


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Which batch entries need which part of sampling: indices into the batch, ascending int64, known on the CPU, so
    that no part syncs. `truncated` are some of `sampled`; `num_top_logprobs` are those of `with_logprobs`, one of each.

    An entry's parameters are in SamplingState at its row; a part that no entry needs costs nothing.
    """

    sampled: NDArray[np.int64]
    truncated: NDArray[np.int64]  # top_k, top_p or min_p
    penalised: NDArray[np.int64]
    biased: NDArray[np.int64]
    min_length: NDArray[np.int64]
    with_logprobs: NDArray[np.int64]
    num_top_logprobs: NDArray[np.int64]

    @classmethod
    def of(cls, params: Sequence[ResolvedSampling]) -> SamplingBatch:
        return cls.of_needs(sampling_needs(params))

    @classmethod
    def of_needs(cls, needs: NDArray[np.int64]) -> SamplingBatch:
        """For a batch whose entries' `sampling_needs` are the rows of `needs` [B, NUM_NEEDS]."""
        sampled, truncated, penalised, biased, min_length, with_logprobs = (
            np.flatnonzero(needs[:, part]) for part in range(NUM_NEEDS - 1)
        )
        return cls(sampled, truncated, penalised, biased, min_length, with_logprobs, needs[with_logprobs, -1])

    @property
    def is_greedy(self) -> bool:
        """Whether every entry wants only the largest of the model's own logits."""
        return not (
            self.sampled.size
            or self.penalised.size
            or self.biased.size
            or self.min_length.size
            or self.with_logprobs.size
        )

    def repeated(self, num_times: int) -> SamplingBatch:
        """For a batch in which each entry appears `num_times`, adjacent."""
        if self.is_greedy:
            return self  # there are no indices
        places = np.arange(num_times)

        def entries(indices: NDArray[np.int64]) -> NDArray[np.int64]:
            return (indices[:, None] * num_times + places).ravel()

        return SamplingBatch(
            sampled=entries(self.sampled),
            truncated=entries(self.truncated),
            penalised=entries(self.penalised),
            biased=entries(self.biased),
            min_length=entries(self.min_length),
            with_logprobs=entries(self.with_logprobs),
            num_top_logprobs=self.num_top_logprobs.repeat(num_times),
        )


NUM_NEEDS = len(fields(SamplingBatch))


def sampling_needs(params: Sequence[ResolvedSampling]) -> NDArray[np.int64]:
    """[B, NUM_NEEDS]: whether each request needs each part, in SamplingBatch's order; top logprobs last."""
    needs = [
        (
            not p.is_greedy,
            p.is_truncated,
            p.has_penalties,
            bool(p.logit_bias),
            p.min_tokens > 0 and bool(p.end_token_ids),
            p.num_logprobs is not None,
            p.num_logprobs or 0,
        )
        for p in params
    ]
    return np.array(needs, dtype=np.int64).reshape(-1, NUM_NEEDS)


NO_SAMPLING = SamplingBatch.of([])
"""The sampling needs of an empty batch."""
