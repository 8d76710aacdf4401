"""At load, before a service is ready: the model as it is served computes what transformers does, however it is cut.

`Unsplit` holds what transformers' own forward of a short prompt gives, before any module is replaced: the keys and
values of every layer, and the logits. `check_forwards` computes the same prompt through the pool, with the modules in
use: twice side by side, in parts, and token by token. Wrong positions change keys by a good part of their size, however
small the weights are; rounding does not. So a model is refused that ignores `position_ids`, mixes the tokens of
neighbours, or fails when it is called like a decoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import UnsupportedModel
from common.model.attention import ForwardInput
from common.model.model_files import one_line
from common.model.target import TargetModel

NUM_TOKENS = 16
_FORWARDS: tuple[tuple[str, dict[int, tuple[int, int]]], ...] = (
    ("prompts side by side", {1: (0, 5), 2: (0, 9)}),
    ("a later part of a prompt", {1: (5, 15), 2: (9, 13)}),
    ("single tokens", {2: (13, 14), 1: (15, 16)}),
)
"""Each computes tokens [start, stop) of the prompt, for either of two rows."""


@dataclass(frozen=True, slots=True)
class _Tolerance:
    """Of the median token's difference, relative to its size. Layers add to what those before them rounded: twelve
    random ones come to a third of what is allowed.
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
    """A prompt's tokens [N], its keys and values [layers, 2, N, heads, head_dim] and logits [N, vocab] float32."""

    token_ids: Tensor
    kv: Tensor
    logits: Tensor


def probe_tokens(model: Any, torch_device: torch.device) -> Tensor:
    """[NUM_TOKENS] ids that are spread over the vocabulary, the padding token left out."""
    vocab_size, pad_id = model.config.vocab_size, getattr(model.config, "pad_token_id", None)
    ids = [token_id for token_id in range(min(vocab_size, 64 * NUM_TOKENS)) if token_id != pad_id] or [0]
    drawn = torch.randint(len(ids), (NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.tensor([ids[index] for index in drawn], dtype=torch.int64, device=torch_device)


@torch.inference_mode()
def check_forwards(target: TargetModel, unsplit: Unsplit, *, name: str) -> None:
    """Raises UnsupportedModel where `target` fails, or computes something else than `unsplit`."""
    pool = _Pool(target, name)
    for what, parts in _FORWARDS:
        logits = pool.forward(what, {row: unsplit.token_ids[start:stop] for row, (start, stop) in parts.items()})
        first = 0
        for row, (start, stop) in parts.items():
            _compare(
                target, unsplit, pool.kv(row, start, stop), logits[first : first + stop - start], start, what, name
            )
            first += stop - start
    _check_last_position(target, unsplit.token_ids[:1], name)


def _compare(
    target: TargetModel, unsplit: Unsplit, kv: Tensor, logits: Tensor, start: int, what: str, name: str
) -> None:
    stop = start + logits.shape[0]
    tolerance = _TOLERANCES[target.dtype]
    if target.torch_device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32 and target.dtype == torch.float32:
        tolerance = _TF32_TOLERANCE
    differences = [
        (f"{plane} of layer {layer}", tolerance.of_layer(layer), kv[layer, index], unsplit.kv[layer, index, start:stop])
        for layer in range(target.num_layers)
        for index, plane in enumerate(("keys", "values"))
    ]
    differences.append(("logits", tolerance.of_layer(target.num_layers), logits, unsplit.logits[start:stop]))
    for where, allowed, seen, expected in differences:
        apart = _median_difference(seen, expected)
        if not apart <= allowed:
            raise UnsupportedModel(
                f"{name}: {target.architecture} computes something else for {what} than for a prompt as a whole:"
                f" {where} differ by {apart:.2g}, and rounding makes {allowed:.2g}; it cannot be served"
            )


def _median_difference(seen: Tensor, expected: Tensor) -> float:
    distances = (seen.float() - expected.float()).flatten(1).norm(dim=1)
    sizes = expected.float().flatten(1).norm(dim=1)
    return float((distances / sizes.clamp_min(torch.finfo(torch.float32).tiny)).quantile(0.5))


class _Pool:
    """KV of two rows, whose slots alternate."""

    def __init__(self, target: TargetModel, name: str) -> None:
        self._target = target
        self._name = name
        device, group = target.torch_device, target.layer_group
        self._kv = torch.zeros(
            (group.num_layers, group.num_planes, 1 + 2 * NUM_TOKENS, group.num_heads, group.head_dim),
            dtype=target.dtype,
            device=device,
        )
        self._table = torch.zeros((3, NUM_TOKENS), dtype=torch.int64, device=device)
        self._table[1:] = 1 + torch.arange(2 * NUM_TOKENS, device=device).view(NUM_TOKENS, 2).T
        self._lens = {1: 0, 2: 0}

    def kv(self, row: int, start: int, stop: int) -> Tensor:
        return self._kv.index_select(2, self._table[row, start:stop])

    def forward(self, what: str, tokens: dict[int, Tensor], *, first_position: int = 0) -> Tensor:
        """Logits of all tokens. `first_position` is added to their positions in their rows."""
        device = self._target.torch_device
        prefix_lens = tuple(self._lens[row] for row in tokens)
        extend_lens = tuple(new.numel() for new in tokens.values())
        for row, new in tokens.items():
            self._lens[row] += new.numel()
        places = [range(self._lens[row] - new.numel(), self._lens[row]) for row, new in tokens.items()]
        is_decode = set(extend_lens) == {1}
        batch = ForwardInput(
            input_ids=torch.cat(list(tokens.values())),
            positions=torch.tensor([first_position + place for each in places for place in each], device=device),
            out_cache_loc=torch.cat([self._table[row, list(each)] for row, each in zip(tokens, places, strict=True)]),
            req_to_token=self._table,
            req_pool_indices=torch.tensor(list(tokens), device=device),
            seq_lens=torch.tensor([self._lens[row] for row in tokens], device=device),
            prefix_lens=None if is_decode else prefix_lens,
            extend_lens=None if is_decode else extend_lens,
            max_seq_len=max(self._lens[row] for row in tokens),
            kv=self._kv,
            logits_rows=None,
        )
        try:
            return self._target.forward_to_compare(batch).logits
        except UnsupportedModel:
            raise
        except Exception as error:  # whatever the model's code does with its arguments
            raise UnsupportedModel(
                f"{self._name}: {self._target.architecture} fails in a forward of {what}: {one_line(error)}"
            ) from error


def _check_last_position(target: TargetModel, token: Tensor, name: str) -> None:
    """Raises UnsupportedModel where the last position that config.json promises has no row in a table of positions."""
    last = target.max_context_tokens - 1
    with _checked_tables(target, f"{name}/config.json: max_position_embeddings is {last + 1}"):
        _Pool(target, name).forward(f"a token at position {last}", {1: token}, first_position=last)


@contextmanager
def _checked_tables(target: TargetModel, says: str) -> Iterator[None]:
    """Looked up past their end, embeddings are a device's fault on CUDA, after which nothing runs."""

    def check(table: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        num_rows: int = module.num_embeddings  # type: ignore[assignment]
        if args and isinstance(args[0], Tensor) and args[0].numel() and int(args[0].max()) >= num_rows:
            raise UnsupportedModel(f"{says}, and {table} has {num_rows} rows")

    hooks = [
        module.register_forward_pre_hook(partial(check, table)) for table, module in target.modules_of(nn.Embedding)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
