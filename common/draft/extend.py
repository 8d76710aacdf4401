"""Draft-extend: the head over tokens that the target has computed, on the target's own states and tokens.

Layer i pairs token t with token t + 1 + i, so at the end of what is known its last i tokens are those that the layers
before it have just drafted:

    known      x1 x2 x3 | bonus
    layer 0    x2 x3 bonus              ─▶ d1
    layer 1    x3 bonus d1              ─▶ d2
    layer 2    bonus d1 d2              ─▶ d3
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.device.upload import upload
from common.draft.head import DraftHead
from common.draft.seed import Seed
from common.sampling.operators import propose, propose_branches
from common.sampling.state import SamplingBatch, SamplingState


@dataclass(frozen=True, slots=True)
class NextTokens:
    """`ids` [N] int64 has every row's tokens, one after the other, each row with room for a draft of each layer but the
    last. `places` [T] int64 says where in `ids` the token after each of the T computed ones is; None if they are `ids`.
    """

    ids: Tensor
    places: Tensor | None = None

    @classmethod
    def of(cls, next_ids: Tensor, window: ForwardInput, *, num_ahead: int) -> NextTokens:
        """Built from `next_ids` [T], the tokens after those of `window`. `num_ahead` counts the head's layers but the
        last.
        """
        if not num_ahead:
            return cls(next_ids)
        num_rows = window.req_pool_indices.shape[0]
        num_tokens = enumerate(window.extend_lens or (1,) * num_rows)
        entries = upload([i for i, num in num_tokens for _ in range(num)], torch.int64, next_ids.device)
        places = torch.arange(next_ids.shape[0], device=next_ids.device) + entries * num_ahead
        ids = torch.nn.functional.pad(next_ids, (0, num_rows * num_ahead))
        return cls(ids.index_copy(0, places, next_ids), places)


@torch.inference_mode()
def extend_draft(
    head: DraftHead,
    window: ForwardInput,
    captured: Tensor,
    *,
    next_tokens: NextTokens,
    last: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingState,
    batch: SamplingBatch,
    topk: int,
) -> Seed:
    """Write the head's KV of `window`, whose target states are `captured` [T, states * H], and draft what follows.

    `last` [R] are the places in T of the last tokens of the rows that go on drafting, `rows` [R] their pool rows,
    `positions` [R] the positions of their first drafts. What a row computes past `last` means nothing. With several
    layers `topk` is 1, and what a layer pairs with a draft stays in its KV if the draft is refused and the token is not
    in the next window.
    """
    num_layers = head.layer_group.num_layers
    if num_layers == 1:
        ids = next_tokens.ids if next_tokens.places is None else next_tokens.ids[next_tokens.places]
        window = replace(window, input_ids=ids, logits_rows=last)
        output = head.extend(window, captured)
        if topk == 1:
            drafted = propose(output.logits, head.token_ids, rows, positions, state, batch)
            return Seed(drafted.unsqueeze(1), hidden_states=output.hidden)
        topk_index, topk_p = propose_branches(output.logits, head.token_ids, rows, positions, state, batch, topk=topk)
        return Seed(topk_index, topk_p, output.hidden)
    assert next_tokens.places is not None, "layers read each other's drafts"
    states = head.fuse(captured)
    ids = next_tokens.ids.clone()
    drafts: list[Tensor] = []
    hidden = states
    for layer in range(num_layers):
        layer_input = replace(window, input_ids=ids[next_tokens.places + layer])
        hidden = head.forward(layer_input, states if head.feeds_target_hidden else hidden, layer=layer)
        logits = head.logits(hidden[last], layer=layer)
        drafted = propose(logits, head.token_ids, rows, positions + layer, state, batch)
        drafts.append(drafted)
        if layer + 1 < num_layers:
            ids[next_tokens.places[last] + layer + 1] = drafted
    return Seed(torch.stack(drafts, dim=1))
