"""Draft-extend: runs the draft head over tokens that the target has computed, with the target's hidden states.

It writes the head's KV of these tokens, and drafts the tokens that follow. Layer i of the head pairs the hidden state
of token t with the embedding of token t + 1 + i. So at the end of the known tokens, layer i needs i drafts of the
layers before it. Here x1 to x3 are the computed tokens, and "bonus" is the token that the target sampled after them:

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
from common.draft.seed import DraftSeed
from common.sampling.operators import propose, propose_branches
from common.sampling.state import SamplingBatch, SamplingState


@dataclass(frozen=True, slots=True)
class NextTokens:
    """The token after each of the T computed tokens, with room for drafts.

    `ids` [N] int64 has the tokens of all rows, one row after the other. After each row there is room for one draft of
    each layer except the last. `places` [T] int64 is the index in `ids` of each computed token's next token. It is None
    for a head with one layer: then there is no such room, and N == T.
    """

    ids: Tensor
    places: Tensor | None = None

    @classmethod
    def of(cls, next_ids: Tensor, forward_input: ForwardInput, *, num_ahead: int) -> NextTokens:
        """Returns the NextTokens of the tokens of `forward_input`. `next_ids` [T] is the token after each of them.

        `num_ahead` is the room for drafts after each row: the head's number of layers minus one.
        """
        if not num_ahead:
            return cls(next_ids)
        num_rows = forward_input.req_pool_indices.shape[0]
        num_tokens = enumerate(forward_input.extend_lens or (1,) * num_rows)
        entries = upload([i for i, num in num_tokens for _ in range(num)], torch.int64, next_ids.device)
        places = torch.arange(next_ids.shape[0], device=next_ids.device) + entries * num_ahead
        ids = torch.nn.functional.pad(next_ids, (0, num_rows * num_ahead))
        return cls(ids.index_copy(0, places, next_ids), places)


@torch.inference_mode()
def extend_draft(
    head: DraftHead,
    forward_input: ForwardInput,
    captured: Tensor,
    *,
    next_tokens: NextTokens,
    last: Tensor,
    rows: Tensor,
    positions: Tensor,
    state: SamplingState,
    batch: SamplingBatch,
    topk: int,
) -> DraftSeed:
    """Writes the head's KV of the T tokens of `forward_input`. Returns drafts of the tokens that follow, as a
    DraftSeed.

    `captured` [T, states * H] are the target's hidden states of the tokens, where H is its hidden size; `next_tokens`
    are the tokens that follow them. R rows go on drafting: `last` [R] is the index (0 .. T-1) of each row's last token,
    `rows` [R] its row in the pool, and `positions` [R] the position of its first draft. `state` and `batch` say how the
    R rows' tokens are sampled, because drafts are guesses of these tokens. `topk` is the number of candidates for the
    first draft.

    Results for tokens of a row after `last` are not used. A head with several layers needs `topk` 1; its KV of a token
    may then depend on a draft that is rejected later, unless the next forward computes the token again.
    """
    num_layers = head.layer_group.num_layers
    if num_layers == 1:
        ids = next_tokens.ids if next_tokens.places is None else next_tokens.ids[next_tokens.places]
        forward_input = replace(forward_input, input_ids=ids, logits_rows=last)
        output = head.extend(forward_input, captured)
        if topk == 1:
            drafted = propose(output.logits, head.token_ids, rows, positions, state, batch)
            return DraftSeed(drafted.unsqueeze(1), hidden_states=output.hidden)
        topk_index, topk_p = propose_branches(output.logits, head.token_ids, rows, positions, state, batch, topk=topk)
        return DraftSeed(topk_index, topk_p, output.hidden)
    assert next_tokens.places is not None, "layers read each other's drafts"
    states = head.fuse(captured)
    ids = next_tokens.ids.clone()
    drafts: list[Tensor] = []
    hidden = states
    for layer in range(num_layers):
        layer_input = replace(forward_input, input_ids=ids[next_tokens.places + layer])
        hidden = head.forward(layer_input, states if head.feeds_target_hidden else hidden, layer=layer)
        logits = head.logits(hidden[last], layer=layer)
        drafted = propose(logits, head.token_ids, rows, positions + layer, state, batch)
        drafts.append(drafted)
        if layer + 1 < num_layers:
            ids[next_tokens.places[last] + layer + 1] = drafted
    return DraftSeed(torch.stack(drafts, dim=1))
