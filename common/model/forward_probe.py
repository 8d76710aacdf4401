"""Checks at load that the served model computes what transformers computes, however a prompt is split.

`Unsplit` holds transformers' own forward of a short prompt, computed before any module is replaced: every layer's keys
and values, and the logits. `check_forwards` computes the same prompt through the KV pool with the serving modules: two
prompts side by side, in parts, and token by token. Wrong positions change keys far more than rounding does. So a model
is refused if it ignores `position_ids`, mixes neighbouring tokens, or fails when called like a decoder.

Some models compute differently only far into a context. So a few tokens are also compared at the end of the context,
and around each limit that the config names (`far_positions`). For these, transformers gets a KV cache that claims to
hold all earlier tokens, and holds none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common.attention.backend import ForwardInput
from common.errors import UnsupportedModel
from common.kv.layer_group import LayerGroupSpec
from common.kv.window_slots import WindowKv
from common.model.model_files import one_line
from common.model.part import MemberLost
from common.model.target import TargetModel

NUM_TOKENS, NUM_FAR_TOKENS = 16, 4
_FORWARDS: tuple[tuple[str, dict[int, tuple[int, int]]], ...] = (
    ("prompts side by side", {1: (0, 5), 2: (0, 9)}),
    ("a later part of a prompt", {1: (5, 15), 2: (9, 13)}),
    ("single tokens", {2: (13, 14), 1: (15, 16)}),
)
"""The forwards to compare, by description. Each computes tokens [start, stop) of the prompt in one or both pool rows.
"""
_LIMIT = re.compile(r"^(?!.*layers).*(?:position|window|chunk|length|context|floor|seq|distance|local)")
"""Matches the names of config fields that hold a position limit, at which some models change what they compute. Counts
of layers are excluded.
"""


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """The allowed difference between a token's values and those that transformers computes, relative to their size.

    The bound is `first_layer` in the first layer and grows by `each_layer` per layer, up to `most`, because each layer
    adds rounding errors. (In a model of twelve random layers they reach a third of the bound.) In the first layer the
    bound holds for every token, and in later layers for the median of a row's tokens. In float32 without TF32 it holds
    for every token in all layers. In a model that routes tokens to experts, rounding may change the route: from its
    second layer on, the bound is `most` and holds for the median, whatever the dtype.
    """

    first_layer: float
    each_layer: float
    most: float

    def of_layer(self, layer: int) -> float:
        return min(self.most, self.first_layer + self.each_layer * layer)


_TOLERANCES = {
    torch.float32: _Tolerance(1e-4, 1e-5, 1e-3),
    torch.float16: _Tolerance(0.003, 0.003, 0.2),
    torch.bfloat16: _Tolerance(0.015, 0.02, 0.5),
}
_TF32_TOLERANCE = _TOLERANCES[torch.float16]


@dataclass(frozen=True, slots=True)
class Unsplit:
    """The forward of a whole prompt by the model before its modules are replaced, as the reference to compare with.

    Shapes: token_ids [N], the first at position `start`; kv of each layer [2, N, heads, head_dim]; logits [N, vocab]
    float32.
    """

    start: int
    token_ids: Tensor
    kv: tuple[Tensor, ...]
    logits: Tensor

    def on(self, torch_device: torch.device) -> Unsplit:
        """Returns this reference on another device."""
        kv = tuple(each.to(torch_device) for each in self.kv)
        return Unsplit(self.start, self.token_ids.to(torch_device), kv, self.logits.to(torch_device))


def probe_tokens(model: Any, torch_device: torch.device) -> Tensor:
    """Returns [NUM_TOKENS] token ids spread over the vocabulary, without the padding token."""
    vocab_size, pad_id = model.config.vocab_size, getattr(model.config, "pad_token_id", None)
    ids = [token_id for token_id in range(min(vocab_size, 64 * NUM_TOKENS)) if token_id != pad_id] or [0]
    drawn = torch.randint(len(ids), (NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.tensor([ids[index] for index in drawn], dtype=torch.int64, device=torch_device)


def far_positions(config: Any) -> list[int]:
    """Returns the positions at which runs of NUM_FAR_TOKENS tokens are compared, in ascending order.

    Runs begin at the short prompt's end and around each limit that `config` names; the last run ends the context.
    """
    last = config.max_position_embeddings - NUM_FAR_TOKENS
    starts = {NUM_TOKENS, *(limit - NUM_FAR_TOKENS // 2 for limit in _limits(config.to_dict()))}
    return [*sorted(start for start in starts if NUM_TOKENS <= start < last), max(last, 0)]


def _limits(fields: Mapping[str, Any]) -> Iterator[int]:
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from _limits(value)
        elif type(value) is int and _LIMIT.search(str(key)):
            yield value


@torch.inference_mode()
def check_forwards(target: TargetModel, unsplit: Unsplit, far: Sequence[Unsplit], *, name: str) -> None:
    """Raises UnsupportedModel if `target` fails, or computes something else than `unsplit` and each of `far`.

    `name` is the model's name, for errors.
    """
    pool = _ProbePool(target, name, num_rows=2)
    for what, parts in _FORWARDS:
        pool.check(what, {row: (unsplit, start, stop) for row, (start, stop) in parts.items()})
    pool = _ProbePool(target, name, num_rows=1 + len(far))
    stretches = dict(enumerate((unsplit, *far), 1))
    where = f"tokens at positions 0, {', '.join(str(each.start) for each in far)}"
    last = NUM_FAR_TOKENS - 1
    pool.check(f"{where} and later, side by side", {row: (each, 0, last) for row, each in stretches.items()})
    pool.check(f"{where} and later, one by one", {row: (each, last, last + 1) for row, each in stretches.items()})


def difference(seen: Tensor, expected: Tensor, *, share: float) -> float:
    """Returns how much `seen` [N, ...] differs from `expected`, as a quantile of `differences` over the N tokens.

    `share` (0 to 1) names the quantile: 0.5 is the median, 1 the largest difference.
    """
    return float(differences(seen, expected).quantile(share))


def differences(seen: Tensor, expected: Tensor) -> Tensor:
    """Returns how much each token of `seen` [N, ...] differs from `expected`, [N] float32: the norm of its deviation,
    divided by the norm of its expected values.
    """
    distances = (seen.float() - expected.float()).flatten(1).norm(dim=1)
    sizes = expected.float().flatten(1).norm(dim=1)
    each: Tensor = distances / sizes.clamp_min(torch.finfo(torch.float32).tiny)
    return each


class _ProbePool:
    """A small KV pool in which forwards are compared with the reference. The slots of its rows are interleaved."""

    def __init__(self, target: TargetModel, name: str, *, num_rows: int) -> None:
        self._target = target
        self._name = name
        device, num_slots = target.torch_device, 1 + num_rows * NUM_TOKENS
        self._table = torch.zeros((1 + num_rows, NUM_TOKENS), dtype=torch.int64, device=device)

        def zeros(group: LayerGroupSpec) -> Tensor:
            num_heads = len(target.heads_in_pool(group))
            shape = (group.num_layers, group.num_planes, num_slots, num_heads, group.head_dim)
            return torch.zeros(shape, dtype=target.dtype, device=device)

        self._kv, same_slots = zeros(target.layer_group), torch.arange(num_slots, device=device)
        self._windows = tuple(
            WindowKv(zeros(window.group), self._table, same_slots, window.layers) for window in target.windows
        )
        self._table[1:] = 1 + torch.arange(num_rows * NUM_TOKENS, device=device).view(NUM_TOKENS, num_rows).T
        is_narrowed = target.torch_device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
        self._tolerance = (
            _TF32_TOLERANCE if is_narrowed and target.dtype == torch.float32 else _TOLERANCES[target.dtype]
        )
        self._routes = target.chooses_experts
        self._is_exact = self._tolerance is _TOLERANCES[torch.float32] and not self._routes

    def check(self, what: str, parts: dict[int, tuple[Unsplit, int, int]]) -> None:
        """Computes one part of a prompt in each row, and compares its KV and logits with the reference.

        `parts` maps a row to (reference, start, stop): the row computes the reference's tokens [start, stop). `what`
        describes the forward in errors. Raises UnsupportedModel if a difference is too large.
        """
        logits = self._forward(what, parts)
        for row, (unsplit, start, stop) in parts.items():
            slots = self._table[row, start:stop]
            of_row, logits = logits[: stop - start], logits[stop - start :]
            for layer in range(self._target.num_layers):
                for index, plane in enumerate(("keys", "values")):
                    heads, in_pool = self._target.own_heads(layer)
                    expected = unsplit.kv[layer][index, start:stop, heads]
                    seen = self._kv_of(layer)[index, slots, in_pool]
                    self._compare(f"{plane} of layer {layer}", layer, seen, expected, what)
            self._compare("logits", self._target.num_layers, of_row, unsplit.logits[start:stop], what)

    def _kv_of(self, layer: int) -> Tensor:
        buffers = (self._kv, *(window.kv for window in self._windows))
        parts = self._target.parts_of(range(layer, layer + 1))
        return next(kv[part.start] for kv, (_, part) in zip(buffers, parts, strict=True) if part)

    def _compare(self, where: str, layer: int, seen: Tensor, expected: Tensor, what: str) -> None:
        allowed = self._tolerance.most if self._routes and layer > 0 else self._tolerance.of_layer(layer)
        apart = difference(seen, expected, share=1.0 if layer == 0 or self._is_exact else 0.5)
        if not apart <= allowed:
            raise UnsupportedModel(
                f"{self._name}: {self._target.architecture} computes something else for {what} than for a prompt as a"
                f" whole: {where} differ by {apart:.2g}, and rounding makes {allowed:.2g}; it cannot be served"
            )

    def _forward(self, what: str, parts: dict[int, tuple[Unsplit, int, int]]) -> Tensor:
        """Runs one forward of `parts` (see `check`), and returns the logits of all its tokens, in the tokens' order.

        If any part has more than one token, it asks for the logits in reverse order, to check that the model respects
        `logits_rows`, and reverses the result.
        """
        device = self._target.torch_device
        lens = tuple(stop - start for _, start, stop in parts.values())
        seq_lens = [stop for _, _, stop in parts.values()]
        is_decode = set(lens) == {1}
        batch = ForwardInput(
            input_ids=torch.cat([unsplit.token_ids[start:stop] for unsplit, start, stop in parts.values()]),
            positions=torch.cat(
                [unsplit.start + torch.arange(start, stop, device=device) for unsplit, start, stop in parts.values()]
            ),
            out_cache_loc=torch.cat([self._table[row, start:stop] for row, (_, start, stop) in parts.items()]),
            req_to_token=self._table,
            req_pool_indices=torch.tensor(list(parts), device=device),
            seq_lens=torch.tensor(seq_lens, device=device),
            prefix_lens=None if is_decode else tuple(start for _, start, _ in parts.values()),
            extend_lens=None if is_decode else lens,
            max_seq_len=max(seq_lens),
            kv=self._kv,
            windows=self._windows,
            logits_rows=None if is_decode else torch.arange(sum(lens), device=device).flip(0),
        )
        try:
            logits = self._target.forward_to_compare(batch).logits
            if logits.shape[0] != sum(lens):
                raise ValueError(f"logits of {logits.shape[0]} tokens where those of {sum(lens)} are asked for")
            return logits if is_decode else logits.flip(0)
        except (UnsupportedModel, MemberLost):
            raise
        except Exception as error:  # the model's code may raise anything
            raise UnsupportedModel(
                f"{self._name}: {self._target.architecture} fails in a forward of {what}: {one_line(error)}"
            ) from error
