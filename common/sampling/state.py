"""The sampling state of each request, in tables indexed by pool row.

Only the forward stream writes them: a row is reset when its request starts, and counted when a token is drawn. Nothing
depends on a row's index in a batch, so merging and filtering batches needs no realignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
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
    """Drafted tokens between a row's output so far and the token to draw. They are not in the row's output counts yet.

    Shapes: token_ids [B, A] int64; counted [B, A] int32, 1 for an ancestor and 0 for padding.
    """

    token_ids: Tensor
    counted: Tensor


class DrawKernels(Protocol):
    """Kernels that draw tokens in one launch, by the rules of operators.py and the rows' SamplingState.

    The arguments are those of `draw`, `propose` and `coupled_logits` in operators.py.
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
        """Returns the drawn token ids [B] int64, and which rows have no finite largest logit, [B] bool. Overwrites
        `logits`.

        If `is_counted`, tokens are added to the output counts of rows that have penalties; rows are then distinct.
        """

    def propose(
        self, logits: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, state: SamplingState
    ) -> Tensor:
        """Draws a draft token for each row from the draft head's logits [B, Vd], as `operators.propose` does.

        `token_ids` [Vd] are the target's ids of the head's logits. Returns the target's ids of the drafts, [B] int64.
        """

    def couple(
        self, logits: Tensor, token_ids: Tensor, rows: Tensor, positions: Tensor, state: SamplingState
    ) -> Tensor:
        """Returns the draft head's logits [B, Vd] with temperature and noise applied. Overwrites `logits`."""


@dataclass(frozen=True, slots=True)
class RowStart:
    """The start of a request in pool row `row`: how its tokens are sampled, and the tokens that it has already.

    The first `prompt_len` of `token_ids` are the prompt. Those after it are output that the request has already.
    """

    row: int
    sampling: ResolvedSampling
    choice_index: int
    token_ids: tuple[int, ...]
    prompt_len: int


class SamplingState:
    """The sampling tables on the device, with max_rows + 1 rows each. Row 0 is padding.

    `in_prompt` (bool) and `output_counts` (int32) are [rows, vocab]. Each numeric parameter is a tensor [rows]. It is a
    column of a table that holds all parameters of its dtype, so its numbers are not contiguous. `floats` holds the
    columns of FLOAT_OPTIONS by name, and `seed` the seeds of the rows' random numbers. Bias and end ids are padded to
    fixed widths: a padded bias adds 0 to token 0, a padded end id repeats the first. `num_bias` and `num_ends` count
    the entries that are not padding. Parts of a row that its request does not use may hold an earlier request's values.
    Tokens are drawn by `kernels`, or by PyTorch's operators if `kernels` is None.
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
        self._int_params = column(torch.int64, 6)  # one table per dtype, so that two operations write a row
        self._float_params = column(torch.float32, len(FLOAT_OPTIONS))
        self.seed, self.choice_index, self.min_position, self.top_k = self._int_params[:, :4].unbind(1)
        self.num_bias, self.num_ends = self._int_params[:, 4:].unbind(1)
        self.floats = dict(zip(FLOAT_OPTIONS, self._float_params.unbind(1), strict=True))
        for name, values in self.floats.items():
            values.fill_(NUMBER_OPTIONS[name].default)  # padding rows have default parameters,
        self.floats["temperature"].zero_()  # and are greedy
        self.bias_ids = column(torch.int64, MAX_LOGIT_BIAS_ENTRIES)
        self.bias_values = column(torch.float32, MAX_LOGIT_BIAS_ENTRIES)
        self.end_ids = column(torch.int64, MAX_END_TOKEN_IDS)
        self.in_prompt = column(torch.bool, vocab_size)
        self.output_counts = column(torch.int32, vocab_size)
        self.token_ids = torch.arange(vocab_size, dtype=torch.int64, device=torch_device)

    def reset(self, starts: Sequence[RowStart]) -> None:
        """Starts new requests: writes the initial state of the row that each RowStart names. Runs on the forward
        stream.
        """
        device = self.seed.device
        rows = upload([start.row for start in starts], torch.int64, device)
        self._int_params[rows] = upload([self._int_params_of(start) for start in starts], torch.int64, device)
        self._float_params[rows] = upload([_float_params_of(start.sampling) for start in starts], torch.float32, device)
        for start in starts:
            self._reset_ragged(start, device)

    def _int_params_of(self, start: RowStart) -> tuple[int, ...]:
        """Returns the row's integer parameters in the order of the table's columns."""
        sampling = start.sampling
        signed = sampling.seed - (1 << 64) if sampling.seed >> 63 else sampling.seed
        top_k = min(sampling.top_k, self.vocab_size) if sampling.top_k else self.vocab_size
        min_position = start.prompt_len + sampling.min_tokens
        has_least = sampling.min_tokens and not sampling.is_constrained  # masks see to it
        num_ends = len(sampling.end_token_ids) if has_least else 0
        return signed, start.choice_index, min_position, top_k, len(sampling.logit_bias), num_ends

    def _reset_ragged(self, start: RowStart, device: torch.device) -> None:
        sampling, row = start.sampling, start.row
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
            tokens = upload(start.token_ids, torch.int64, device)
            self.in_prompt[row].zero_()
            self.in_prompt[row].index_fill_(0, tokens[: start.prompt_len], True)
            output = tokens[start.prompt_len :]
            self.output_counts[row].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def count(self, rows: Tensor, token_ids: Tensor) -> None:
        """Adds one drawn token to each row's output counts. Shapes: rows, token_ids [B] int64; rows are distinct."""
        self.output_counts[rows, token_ids] += 1

    def count_runs(self, rows: Tensor, token_ids: Tensor, is_counted: Tensor) -> None:
        """Adds to each row's output counts those of its M tokens for which `is_counted` is True.

        Shapes: rows [B] int64; token_ids [B, M] int64; is_counted [B, M] bool. A token may occur several times.
        """
        each_row = rows.unsqueeze(1).expand_as(token_ids)
        self.output_counts.index_put_((each_row, token_ids), is_counted.to(torch.int32), accumulate=True)


_COOLEST = 1e-3
"""The smallest temperature that is computed with. Below it, tokens equal greedy's, and logits / temperature may
overflow.
"""
FLOAT_OPTIONS = tuple(name for name, option in NUMBER_OPTIONS.items() if option.kind is float)
"""The names of the columns in `SamplingState.floats`, in order."""


def _float_params_of(sampling: ResolvedSampling) -> tuple[float, ...]:
    if sampling.is_greedy:
        sampling = replace(sampling, temperature=0.0)
    elif sampling.temperature < _COOLEST:
        sampling = replace(sampling, temperature=_COOLEST)
    return tuple([getattr(sampling, name) for name in FLOAT_OPTIONS])


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The batch entries that need each part of sampling. A part that no entry needs costs nothing.

    Each field but the last holds ascending int64 indices into the batch. They are on the CPU, so reading them does not
    wait for the device. `truncated` is a subset of `sampled`. `num_top_logprobs` has one number for each entry of
    `with_logprobs`. The parameters themselves are in SamplingState, at the entry's row.
    """

    sampled: NDArray[np.int64]
    truncated: NDArray[np.int64]  # some option excludes tokens from the draw
    penalised: NDArray[np.int64]
    biased: NDArray[np.int64]
    min_length: NDArray[np.int64]
    constrained: NDArray[np.int64]  # the draw gets a mask for each of them
    with_logprobs: NDArray[np.int64]
    num_top_logprobs: NDArray[np.int64]

    @classmethod
    def of(cls, params: Sequence[ResolvedSampling]) -> SamplingBatch:
        return cls.of_needs(sampling_needs(params))

    @classmethod
    def of_needs(cls, needs: NDArray[np.int64]) -> SamplingBatch:
        """Makes the batch from `needs` [B, NUM_NEEDS], which holds a row of `sampling_needs` for each entry."""
        sampled, truncated, penalised, biased, min_length, constrained, with_logprobs = (
            np.flatnonzero(needs[:, part]) for part in range(NUM_NEEDS - 1)
        )
        return cls(
            sampled, truncated, penalised, biased, min_length, constrained, with_logprobs, needs[with_logprobs, -1]
        )

    @property
    def is_greedy(self) -> bool:
        """Whether every entry only takes the largest of the model's unmodified logits."""
        return not (
            self.sampled.size
            or self.penalised.size
            or self.biased.size
            or self.min_length.size
            or self.constrained.size
            or self.with_logprobs.size
        )

    def repeated(self, num_times: int) -> SamplingBatch:
        """Returns a batch that repeats each entry `num_times`; the copies of an entry are adjacent."""
        if self.is_greedy:
            return self  # no index to repeat
        places = np.arange(num_times)

        def entries(indices: NDArray[np.int64]) -> NDArray[np.int64]:
            return (indices[:, None] * num_times + places).ravel()

        return SamplingBatch(
            sampled=entries(self.sampled),
            truncated=entries(self.truncated),
            penalised=entries(self.penalised),
            biased=entries(self.biased),
            min_length=entries(self.min_length),
            constrained=entries(self.constrained),
            with_logprobs=entries(self.with_logprobs),
            num_top_logprobs=self.num_top_logprobs.repeat(num_times),
        )


NUM_NEEDS = len(fields(SamplingBatch))


def sampling_needs(params: Sequence[ResolvedSampling]) -> NDArray[np.int64]:
    """Returns which parts of sampling each request needs, [B, NUM_NEEDS] int64.

    There is one column for each field of SamplingBatch, in the same order. The last column has the number of top
    logprobs; the others have 1 if the request needs the part, and 0 otherwise.
    """
    needs = [
        (
            not p.is_greedy,
            p.is_truncated,
            p.has_penalties,
            bool(p.logit_bias),
            p.min_tokens > 0 and bool(p.end_token_ids) and not p.is_constrained,  # masks see to it
            p.is_constrained,
            p.num_logprobs is not None,
            p.num_logprobs or 0,
        )
        for p in params
    ]
    return np.array(needs, dtype=np.int64).reshape(-1, NUM_NEEDS)


NO_SAMPLING = SamplingBatch.of([])
"""The SamplingBatch of an empty batch."""
