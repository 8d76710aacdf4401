"""Which models are served: decoder-only, every layer with full causal attention. Others are refused by name.

`check_config` reads what a config says of itself; `probe_attention` runs the model once on two tokens and looks at what
each layer asks of its attention, so that an unknown architecture is judged by what it does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from common.errors import UnsupportedModel

PROBE_NAME = "baton_probe"
_ALIBI_MODEL_TYPES = ("bloom", "mpt")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_ATTENTION_KEYWORDS = {
    "sliding_window": "sliding-window attention",
    "softcap": "attention logit softcapping",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
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
    for layer_type in value("layer_types") or ():
        if layer_type != "full_attention":
            return f"a layer of type {layer_type}"
    if value("sliding_window") is not None and value("use_sliding_window") is not False:
        return f"sliding-window attention (sliding_window={value('sliding_window')})"
    if value("attention_chunk_size") is not None:
        return "chunked attention"
    if value("attn_logit_softcapping") is not None:
        return "attention logit softcapping"
    rope = value("rope_parameters") or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        return f"rope of type {rope['rope_type']}, which rotates by the longest sequence of a forward,"
    return None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What each layer attends with; `num_heads` are the query's."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class _Probe:
    """What the layers asked for, in the order they asked."""

    def __init__(self) -> None:
        self.layers: list[tuple[int, int, int, int]] = []
        self.trait: str | None = None

    def observe(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, keywords: dict[str, Any]
    ) -> None:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            self._refuse("an attention layer without an index")
            return
        self.layers.append((layer, query.shape[1], key.shape[1], key.shape[3]))
        if key.shape != value.shape:
            self._refuse("keys and values of different shapes")
        if mask is not None:
            self._refuse("an attention mask of the model's own")
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
    attention_probe: _Probe,
    **keywords: Any,
) -> tuple[Tensor, None]:
    attention_probe.observe(module, query, key, value, attention_mask, keywords)
    return torch.zeros_like(query).transpose(1, 2), None


AttentionInterface.register(PROBE_NAME, _probe_attention)


@torch.inference_mode()
def probe_attention(model: Any, *, name: str, torch_device: torch.device) -> AttentionShape:
    """The shape of the model's KV, from what its layers hand to attention. `model` must use PROBE_NAME.

    Raises UnsupportedModel, naming the trait, unless each layer attends exactly once, fully, causally and with
    one shape.
    """

    def refused(trait: str) -> UnsupportedModel:
        return UnsupportedModel(f"{name}: {trait} is not supported")

    probe = _Probe()
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=torch_device)
    try:
        model(
            input_ids=tokens,
            position_ids=torch.arange(2, device=torch_device).unsqueeze(0),
            use_cache=False,
            logits_to_keep=1,
            attention_probe=probe,
        )
    except (TypeError, ValueError, RuntimeError) as error:
        if probe.trait is None:
            raise refused(
                f"{type(model).__name__}, whose forward fails when called like a decoder's ({error}),"
            ) from error
    if probe.trait is not None:
        raise refused(probe.trait)
    num_layers = model.config.num_hidden_layers
    if [layer for layer, *_ in probe.layers] != list(range(num_layers)):
        raise refused(f"attention in {len(probe.layers)} of {num_layers} layers")
    shapes = {tuple(shape) for _, *shape in probe.layers}
    if len(shapes) != 1:
        raise refused("layers with different attention shapes")
    return AttentionShape(num_layers, *shapes.pop())
