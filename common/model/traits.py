"""Decides which models are served: decoder-only ones with causal attention in every layer, in full or in a sliding
window. Others are refused.

`check_config` reads what the config states. `probe_attention` runs the model on a few tokens and observes how each
layer calls its attention, so an unknown architecture is judged by its behaviour.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.attention.backend import LayerAttention
from common.attention.torch_attention import attend_prompt
from common.errors import UnsupportedModel
from common.model.forward_probe import NUM_FAR_TOKENS, NUM_TOKENS, Unsplit, difference, far_positions, probe_tokens
from common.model.model_files import CONFIG, ROTATED_SHARES, one_line

PROBE_NAME, _MASKED_PROBE_NAME = "baton_probe", "baton_probe_with_masks"
_ALIBI_MODEL_TYPES = ("bloom", "mpt")
_TOLERANCE = 1e-3  # for forwards that compute the same with the same kernels
_MAX_KEYS = 1 << 16
_ATTENTION_KEYWORDS = {
    "sinks": "attention sinks of another form",
    "position_bias": "an attention position bias",
    "indices": "sparse attention",
}


def check_config(config: Any, *, name: str) -> None:
    """Raises UnsupportedModel, naming the model and the first trait that is not served."""
    trait = _unsupported_trait(config)
    if trait is not None:
        raise UnsupportedModel(f"{name}: {trait} is not supported")


def _unsupported_trait(config: Any) -> str | None:
    def value(key: str) -> Any:
        return getattr(config, key, None)

    if value("is_encoder_decoder"):
        return "an encoder-decoder architecture"
    if value("add_cross_attention"):
        return "cross attention"
    for key in ("vision_config", "audio_config", "text_config"):
        if value(key) is not None:
            return f"a multi-modal architecture ({key})"
    if value("is_causal") is False:
        return "non-causal attention"
    if value("alibi") or value("position_embedding_type") == "alibi" or value("model_type") in _ALIBI_MODEL_TYPES:
        return "ALiBi attention"
    if isinstance(context := value("max_position_embeddings"), int) and context < NUM_TOKENS:
        return f"a context of {context} tokens (max_position_embeddings), below {NUM_TOKENS},"
    for layer_type in value("layer_types") or ():
        if layer_type not in ("full_attention", "sliding_attention"):
            return f"a layer of type {layer_type}"
    if value("attention_chunk_size") is not None:
        return "chunked attention"
    if value("num_kv_shared_layers"):
        return "KV that layers share (num_kv_shared_layers)"
    rope = value("rope_parameters") or {}
    of_layer_types = [part for part in rope.values() if isinstance(part, dict)]
    if of_layer_types and "rope_type" in rope:
        return "rope of its own for a type of layers, where the model rotates all layers alike,"
    for each in (rope, *of_layer_types):
        rope_type = each.get("rope_type", "default")
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            return f"rope of the unknown type {rope_type!r}"
    return None


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of the attention in one layer. `num_heads` counts query heads.

    `window` is None for a layer that attends all earlier tokens.
    """

    window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int


class _AttentionProbe:
    """Records the attention calls of a forward in order, and the first trait that is not served.

    `num_tokens` is the row's length if `_probe_mask` makes the masks, else None.
    """

    def __init__(self, num_tokens: int | None = None) -> None:
        self._num_tokens = num_tokens
        self.layers: list[int] = []
        self.shapes: list[LayerShape] = []
        self.queries: list[Tensor] = []
        self.kv: list[Tensor] = []
        self.trait: str | None = None

    def observe(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, keywords: dict[str, Any]
    ) -> None:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            self._refuse("an attention layer without an index")
            return
        self.queries.append(query[0].transpose(0, 1))
        self.layers.append(layer)
        self.shapes.append(LayerShape(keywords.get("sliding_window"), query.shape[1], key.shape[1], key.shape[3]))
        if key.shape == value.shape:
            self.kv.append(torch.stack([key[0], value[0]]).transpose(1, 2))
        else:
            self._refuse("keys and values of different shapes")
        window, softcap = keywords.get("sliding_window"), keywords.get("softcap")
        if softcap is not None and not softcap > 0:
            self._refuse(f"attention with a soft cap of {softcap}")
        if window is not None and (type(window) is not int or window < 1):
            self._refuse(f"a sliding window of {window} tokens")
        elif mask is not None and (mask.dim() > 0 or int(mask) != window):
            self._refuse("an attention mask of the model's own")
        elif mask is None and window is not None and self._num_tokens is not None and window < self._num_tokens:
            self._refuse("a sliding window that its mask lacks")
        if getattr(module, "is_causal", True) is False or keywords.get("is_causal") is False:
            self._refuse("non-causal attention")
        for keyword, trait in _ATTENTION_KEYWORDS.items():
            if keywords.get(keyword) is not None:
                self._refuse(trait)

    def _refuse(self, trait: str) -> None:
        self.trait = self.trait or trait


def _probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    attention_probe: _AttentionProbe | None = None,
    scaling: float | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    if attention_probe is None:
        raise ValueError("its layers are not handed what its caller hands it")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    attention_probe.observe(module, query, key, value, attention_mask, keywords)
    if attention_probe.trait is not None:
        return torch.zeros_like(query).transpose(1, 2), None
    how = LayerAttention.from_keywords(scaling, **keywords)
    query, key, value = (each[0].transpose(0, 1) for each in (query, key, value))
    return attend_prompt(query, key, value, how).unsqueeze(0), None


def _probe_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    q_offset: int = 0,
    kv_offset: int = 0,
    device: Any = "cpu",
    **_: Any,
) -> Tensor | None:
    """Returns a mask in short form: None if each token attends itself and all earlier tokens; the number of tokens as a
    tensor [] if it attends only a window of the latest ones; otherwise the mask itself, at some of the keys.

    transformers calls this to build the mask, and the model passes the result to its layers. The probe accepts None,
    or the size of the layer's own window, and refuses everything else.
    """
    queries = q_offset + torch.arange(q_length, device=device).unsqueeze(1)
    spread = torch.arange(0, kv_length, 1 + kv_length // _MAX_KEYS, device=device)
    keys = kv_offset + torch.cat([spread, torch.arange(max(0, kv_length - _MAX_KEYS), kv_length, device=device)])
    first = torch.zeros((), dtype=torch.int64, device=device)
    attended: Tensor = mask_function(first, first, queries, keys)
    if bool((attended == (keys <= queries)).all()):
        return None
    window = attended[-1, len(spread) :].sum()
    in_window = (keys <= queries) & (keys > queries - window)
    return window if bool((attended == in_window).all()) else attended


AttentionInterface.register(PROBE_NAME, _probe_attention)
AttentionInterface.register(_MASKED_PROBE_NAME, _probe_attention)
AttentionMaskInterface.register(_MASKED_PROBE_NAME, _probe_mask)


class _ToldPast(DynamicCache):
    """A KV cache that claims `length` past tokens without holding any keys or values."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


@torch.inference_mode()
def probe_attention(
    model: Any, *, name: str, torch_device: torch.device
) -> tuple[tuple[LayerShape, ...], Unsplit, list[Unsplit]]:
    """Observes how each layer of the model attends, and computes reference forwards before any of its modules is
    replaced.

    Returns the shape of each layer's attention, the reference forward of a short prompt, and one reference forward that
    begins at each position that `far_positions` returns. `model` must be set to the attention implementation
    PROBE_NAME; afterwards it is set to another one. Raises UnsupportedModel, naming the trait, unless each layer calls
    attention exactly once, each token attends to all tokens up to itself or to a window of them, and layers that attend
    alike have the same shape.
    """

    def refused(trait: str) -> UnsupportedModel:
        return UnsupportedModel(f"{name}: {trait} is not supported")

    def forward(tokens: Tensor, **keywords: Any) -> Tensor:
        try:
            keywords = {"use_cache": False, **keywords}
            logits: Tensor = model(input_ids=tokens.unsqueeze(0), **keywords).logits[0].float()
        except UnsupportedModel:
            raise
        except Exception as error:  # the model's code may raise anything
            raise refused(
                f"{type(model).__name__}, whose forward fails when called like a decoder's ({one_line(error)}),"
            ) from error
        return logits

    probe = _AttentionProbe()
    tokens = probe_tokens(model, torch_device)
    try:
        forward(tokens, attention_probe=probe)
    except UnsupportedModel:
        if probe.trait is None:
            raise
    if probe.trait is not None:
        raise refused(probe.trait)
    num_layers = model.config.num_hidden_layers
    if probe.layers != list(range(num_layers)):
        order = " out of order" if len(probe.layers) == num_layers else ""
        raise refused(f"attention in {len(probe.layers)} of {num_layers} layers{order}")
    context = model.config.max_position_embeddings
    without_windows = [  # without windows that no context leaves
        replace(shape, window=None) if shape.window is not None and shape.window >= context else shape
        for shape in probe.shapes
    ]
    shapes = next((tuple(each) for each in (without_windows, probe.shapes) if _differ_by_window(each)), None)
    if shapes is None:
        raise refused("layers that attend alike with different attention shapes")
    _check_rotated_share(model, {shape.head_dim for shape in shapes}, name)
    model.set_attn_implementation("eager")
    logits = forward(tokens)
    if not bool(torch.isfinite(logits).all()):
        raise UnsupportedModel(
            f"{name}: its logits are no numbers: weights or {CONFIG} are damaged, or dtype is too narrow"
        )
    if logits.shape[-1] != model.config.vocab_size:
        raise refused(f"logits of {logits.shape[-1]} tokens, and vocab_size {model.config.vocab_size},")
    model.set_attn_implementation(_MASKED_PROBE_NAME)
    with _checked_tables(model, f"{name}/{CONFIG}: max_position_embeddings is {model.config.max_position_embeddings}"):
        far = [
            _compute_far(forward, model, tokens[:NUM_FAR_TOKENS], start, name) for start in far_positions(model.config)
        ]
    return shapes, Unsplit(0, tokens, tuple(probe.kv), logits), far


def _differ_by_window(shapes: Sequence[LayerShape]) -> bool:
    """Returns whether layers with the same window, or without one, have the same shape."""
    return len(set(shapes)) == len({shape.window for shape in shapes})


def _compute_far(forward: Callable[..., Tensor], model: Any, tokens: Tensor, start: int, name: str) -> Unsplit:
    """Computes `tokens` at positions `start` and up, and returns the result as a reference.

    `forward` calls the model with tokens and the model's keyword arguments, and returns the logits. The model gets its
    positions from a KV cache that claims `start` past tokens. Baton passes positions explicitly instead, so this raises
    UnsupportedModel if explicit positions give other queries, keys or values.
    """
    positions = torch.arange(start, start + tokens.numel(), device=tokens.device).unsqueeze(0)
    past = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    own, told = _AttentionProbe(start + tokens.numel()), _AttentionProbe(tokens.numel())
    logits = forward(tokens, attention_probe=own, use_cache=True, **{past: _ToldPast(start)})
    forward(tokens, attention_probe=told, position_ids=positions)
    if own.trait is not None or told.trait is not None:
        raise UnsupportedModel(f"{name}: {own.trait or told.trait} is not supported")
    pairs = [
        pair
        for layer in range(len(own.kv))
        for pair in (
            ("queries", layer, own.queries[layer], told.queries[layer]),
            ("keys", layer, own.kv[layer][0], told.kv[layer][0]),
            ("values", layer, own.kv[layer][1], told.kv[layer][1]),
        )
    ]
    for plane, layer, expected, seen in pairs:
        apart = difference(seen, expected, share=0.5)
        if not apart <= _TOLERANCE:
            raise UnsupportedModel(
                f"{name}: {type(model).__name__} computes something else at position {start} of a prompt than when it"
                f" is told this position: {plane} of layer {layer} differ by {apart:.2g}; it cannot be served"
            )
    return Unsplit(start, tokens, tuple(own.kv), logits)


@contextmanager
def _checked_tables(model: nn.Module, says: str) -> Iterator[None]:
    """Inside this context, looking up a row past the end of an embedding table raises UnsupportedModel.

    On a CUDA device such a look-up, of a position for example, would be an unrecoverable fault. The error's message
    begins with `says`.
    """

    def check(table: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        num_rows: int = module.num_embeddings  # type: ignore[assignment]
        if args and isinstance(args[0], Tensor) and args[0].numel() and int(args[0].max()) >= num_rows:
            raise UnsupportedModel(f"{says}, and {table} has {num_rows} rows")

    hooks = [
        module.register_forward_pre_hook(partial(check, table))
        for table, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def computes_rotation(model: nn.Module) -> bool:
    """Returns whether the model computes rotary embedding from frequencies, and so at any position."""
    return any(name.endswith("inv_freq") for name, _ in model.named_buffers())


def _check_rotated_share(model: Any, head_dims: Set[int], name: str) -> None:
    """Raises UnsupportedModel if rotary embedding rotates a different share of the heads than the config states."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    shares = {key: rope.get(key, getattr(model.config, key, None)) for key in ROTATED_SHARES}
    rotated = {2 * buffer.numel() for buffer_name, buffer in model.named_buffers() if buffer_name.endswith("inv_freq")}
    for key, share in shares.items():
        expected = set() if share is None else {int(head_dim * share) for head_dim in head_dims}
        if share is not None and rotated and rotated != {each + each % 2 for each in expected}:
            raise UnsupportedModel(
                f"{name}/{CONFIG}: {key} is {share}, and {type(model).__name__} rotates {max(rotated)} of a head's"
                f" {max(head_dims)} numbers"
            )
