"""The interface of drafting. A Drafter proposes tokens, and the worker verifies them.

worker:   resolve ─▶ draft ──────▶ verify ─▶ publish ─▶ read
drafter:             proposes                           learns what the step committed, and leaves seeds

If reading computes nothing, it is a part of verify.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.grammar.matcher import NOT_FORCED
from common.kv.layer_group import SeedColumnSpec
from common.sampling.state import RowStart
from decode_service.forward.forward_batch import ForwardBatch
from decode_service.forward.future_map import RelayedInputs
from decode_service.speculate.spec_info import DraftTree, Unread


@dataclass(frozen=True, slots=True)
class Verified:
    """The target's results at W nodes of each entry. Only the first few nodes are accepted.

    The first node is the entry's last committed token, which is always accepted; the others are drafts. `tokens`
    [B, W] are the tokens that the target drew after each node. `new_seq_lens` [B] are the entries' lengths with the
    accepted tokens. `captured` [B, W, states * H] are the target's hidden states at the nodes (several of size H for
    each), None if the target captures none. `accepted` [B] counts the accepted nodes, None without drafts.
    """

    tokens: Tensor
    new_seq_lens: Tensor
    captured: Tensor | None
    accepted: Tensor | None = None

    @property
    def accept_lens(self) -> Tensor:
        """The number of accepted nodes of each entry, [B].

        Only the device knows these numbers. An impossible one is clamped here, so that it indexes the row's own nodes;
        later the host checks the numbers and fails the row.
        """
        if self.accepted is None:
            return torch.ones_like(self.new_seq_lens)
        return self.accepted.clamp(1, self.tokens.shape[1])

    def last_tokens(self) -> Tensor:
        """Returns the last committed token of each entry, [B], whose KV is not computed yet."""
        if self.accepted is None:
            return self.tokens[:, 0]
        return self.tokens.gather(1, self.accept_lens.unsqueeze(1) - 1).squeeze(1)


@dataclass(frozen=True, slots=True)
class Reading:
    """How far a drafter has read the rows of a step. A token is read when the drafter can draft what follows it.

    `unread` are the rows' unread tokens before the step, and `num_left` [B] counts those after it. If `computes`,
    reading takes a forward, which runs after the step's lengths are published.
    """

    unread: Unread
    num_left: NDArray[np.int64]
    computes: bool = False


class Drafter(ABC):
    """Proposes the drafts of each step.

    `begin`, `unread` and `launch` are called by the engine's thread, and concern the rows as they will be when all
    launched steps have run. `draft` and `read` run on the forward stream, in the order of the steps. On a device that
    computes beside the host, such as a GPU, both must only enqueue work: reading a value would make the engine's thread
    wait for the device in each step.

    `seed_columns` describe what `read` leaves for the next step's `draft`. The prefill service hands over a prompt's
    first seeds.
    """

    seed_columns: tuple[SeedColumnSpec, ...] = ()

    def begin(self, starts: Sequence[RowStart]) -> None:  # noqa: B027 - not every drafter has something to learn
        """Learns which requests enter which rows, and their tokens so far. No launched step runs these rows."""

    def unread(self, rows: NDArray[np.int64]) -> Unread:
        """Returns the unread tokens of `rows` [B]."""
        return Unread(np.zeros_like(rows))

    def launch(self, batch: ForwardBatch) -> Reading:
        """Notes that `batch` is being launched. Returns how far `read` will get in this step."""
        return Reading(self.unread(batch.rows), np.zeros_like(batch.rows))

    @abstractmethod
    def draft(self, batch: ForwardBatch, inputs: RelayedInputs) -> DraftTree:
        """Returns the drafts of a step, as many as `batch.spec_info` says, each a token of the target's vocabulary.

        Forced tokens take the place of a chain's drafts afterwards, so only a drafter of trees, or one that continues
        after forced tokens, needs to look at `batch.forced`.
        """

    def read(self, batch: ForwardBatch, reading: Reading, verified: Verified) -> Mapping[str, Tensor]:
        """Learns the step's tokens. Returns the seeds for the next step, as columns [B, ...] by name."""
        return {}


class NoDrafter(Drafter):
    """The drafter of a service that never drafts: every step has the speculation NO_DRAFTS."""

    def draft(self, batch: ForwardBatch, inputs: RelayedInputs) -> DraftTree:
        raise AssertionError("nobody proposes drafts in this service")


def forced_or(forced: Tensor, drafts: Tensor) -> Tensor:
    """Returns `drafts` with the forced tokens in their places, where there are any."""
    return torch.where(forced == NOT_FORCED, drafts, forced)
