"""Makes the tensors of each training step from conversations and features, and decides the order of the steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.data import Conversations, Ints
from training.features import Features
from training.vocabulary import UNKNOWN

_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Batch:
    """B conversations padded to L tokens, for S draft steps of the training-time test.

    Position i of conversation b is row b * L + i of the flattened head output. At draft step s this row predicts the
    token at position i + 2 + s.

      token_ids    [B, L + S]           the conversations' tokens
      aux          [B, L, layers * H]   the target's hidden states at the captured layers, bfloat16
      final        [N, H]               for the loss: the target's final states at the N positions that are learned,
                                        bfloat16. A position from S on is learned if its next token is in the answer,
                                        and the target's most likely next token in the draft vocabulary
      rows         [N]                  for each learned position, the row that predicts its next token at step 0; at
                                        step s the row s places earlier predicts it
      chain_rows   [M]                  for the evaluation: the rows whose S drafts all belong to the answer
      chain_ids    [M, S]               for each chain row, the draft ids of the target's most likely tokens
    """

    token_ids: Tensor
    aux: Tensor
    final: Tensor
    rows: Tensor
    chain_rows: Tensor
    chain_ids: Tensor
    num_answer_tokens: int

    @property
    def length(self) -> int:
        return self.aux.shape[1]


class BatchSource:
    def __init__(
        self,
        conversations: Conversations,
        features: Features,
        *,
        draft_ids: Ints,
        num_steps: int,
        batch_tokens: int,
        device: torch.device,
    ) -> None:
        self._conversations = conversations
        self._features = features
        self._draft_ids = draft_ids
        self._num_steps = num_steps
        self._batch_tokens = batch_tokens
        self._device = device

    def grouped(self, chosen: Ints) -> list[Ints]:
        """Returns groups of conversations, one group per batch.

        Within each block of `chosen`, conversations of similar length are grouped.
        """
        lengths = self._conversations.lengths
        groups = []
        for block_start in range(0, len(chosen), _BLOCK):
            block = chosen[block_start : block_start + _BLOCK]
            block = block[np.argsort(lengths[block], kind="stable")]
            first = 0
            while first < len(block):
                last = first + 1
                while last < len(block) and (last + 1 - first) * lengths[block[last]] <= self._batch_tokens:
                    last += 1
                groups.append(block[first:last])
                first = last
        return groups

    def epoch(self, chosen: Ints, *, seed: int, epoch: int) -> list[Ints]:
        """Returns the groups of one pass over `chosen`. Their order depends only on `seed` and `epoch`."""
        random = np.random.default_rng((seed, epoch))
        groups = self.grouped(random.permutation(chosen))
        return [groups[index] for index in random.permutation(len(groups))]

    def load(self, group: Ints) -> Batch:
        lengths = self._conversations.lengths[group]
        length, num_steps = int(lengths.max()), self._num_steps
        token_ids = torch.zeros(len(group), length + num_steps, dtype=torch.int64)
        aux = torch.zeros(len(group), length, self._features.aux.shape[1], dtype=torch.bfloat16)
        finals, rows, chain_rows, chain_ids = [], [], [], []
        for row, (conversation, own_length) in enumerate(zip(group, lengths, strict=True)):
            start = self._conversations.offsets[conversation]
            place = slice(start, start + own_length)
            answer = self._conversations.answer_start[conversation]
            token_ids[row, :own_length] = torch.from_numpy(self._conversations.tokens[place])
            aux[row, :own_length] = _states(self._features.aux[place])
            draft_ids = self._draft_ids[self._features.argmax[place]]
            # At the last step, positions before `num_steps` would be predicted by a row before the conversation's
            # start.
            learned = np.arange(max(num_steps, answer - 1), own_length - 1)
            learned = learned[draft_ids[learned] != UNKNOWN]
            finals.append(self._features.final[start + learned])
            rows.append(row * length + learned - 1)
            chains = np.arange(max(0, answer - 2), own_length - 1 - num_steps)
            chain_rows.append(row * length + chains)
            chain_ids.append(draft_ids[chains[:, None] + 1 + np.arange(num_steps)])
        return Batch(
            self._moved(token_ids),
            self._moved(aux),
            self._moved(_states(np.concatenate(finals))),
            self._moved(torch.from_numpy(np.concatenate(rows))),
            self._moved(torch.from_numpy(np.concatenate(chain_rows))),
            self._moved(torch.from_numpy(np.concatenate(chain_ids))),
            self._conversations.num_answer_tokens(group),
        )

    def _moved(self, tensor: Tensor) -> Tensor:
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def _states(bits: NDArray[np.uint16]) -> Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16)
