"""Fixes the rotation of models whose rope follows the length of a sequence: the types `longrope` and `dynamic`.

transformers chooses the rotation of such a model anew in each forward, by the longest sequence in it. A row's KV would
then depend on the rows beside it, and on how long the row was when each of its tokens was computed. Baton instead uses
one rotation for all rows: the one that transformers uses for a sequence as long as the served context.
"""

from __future__ import annotations

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.errors import UnsupportedModel

_BY_LENGTH = (("short_factor", "long_factor"), ("short_mscale", "long_mscale"))
"""Pairs of longrope's parameters: for sequences of at most the original length, and for longer ones."""
_WITH_ALPHA = ("hunyuan_v1_dense", "hunyuan_v1_moe")
"""Model types whose rope of type dynamic rotates all sequences alike if it has the parameter `alpha`."""


def fix_rotation(config: Any, *, max_context_tokens: int | None) -> str:
    """Changes `config` so that all sequences are rotated as transformers rotates one as long as the served context.

    The served context is `max_context_tokens`, but at most the model's; None stands for the model's. With `dynamic`
    rope a model can serve `factor` times its `max_position_embeddings`, which is set to the served context if that is
    longer.

    Returns the name of the rotation that the served context chose. Services that chose different ones cannot exchange
    KV. Empty if the rope follows no length. Raises UnsupportedModel for parameters that the model does not compute
    with.
    """
    ropes = getattr(config, "rope_parameters", None) or {}
    chosen, stretched = [], []
    for layer_type in [None] if "rope_type" in ropes else list(ropes):
        rope = ropes if layer_type is None else ropes[layer_type]
        kind = rope.get("rope_type") if isinstance(rope, dict) else None
        if kind == "longrope":
            chosen.append(_fix_longrope(config, rope, max_context_tokens))
        elif kind == "dynamic" and not (rope.get("alpha") and config.model_type in _WITH_ALPHA):
            context, num_rotated = _context_of_dynamic(config, rope, layer_type, max_context_tokens)
            stretched.append((rope, context, num_rotated))
            chosen.append(f"dynamic-{context}")
    original = config.max_position_embeddings
    for rope, context, num_rotated in stretched:
        _fix_dynamic(rope, context / original, num_rotated)
        config.max_position_embeddings = max(config.max_position_embeddings, context)
    return "-".join(chosen)


def _fix_longrope(config: Any, rope: dict[str, Any], max_context_tokens: int | None) -> str:
    context = min(config.max_position_embeddings, max_context_tokens or config.max_position_embeddings)
    is_long = context > rope["original_max_position_embeddings"]
    for short, long in _BY_LENGTH:
        if short in rope or long in rope:
            rope[short] = rope[long] = rope[long if is_long else short]
    return "longrope-long" if is_long else "longrope-short"


def _context_of_dynamic(
    config: Any, rope: dict[str, Any], layer_type: str | None, max_context_tokens: int | None
) -> tuple[int, int]:
    """Returns the served context, at least the original one, and how many numbers of a head are rotated."""
    if rope.get("alpha"):
        raise UnsupportedModel(f"rope of type dynamic with alpha is not supported for {config.model_type}")
    original = config.max_position_embeddings
    context = max(original, min(max_context_tokens or original, int(rope["factor"] * original)))
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, layer_type=layer_type)
    return context, 2 * frequencies.numel()


def _fix_dynamic(rope: dict[str, Any], times_original: float, num_rotated: int) -> None:
    """Replaces the rope by one of type linear, which transformers computes alike except for the base.

    The served context is `times_original` as long as the original one.
    """
    factor = rope["factor"]
    stretch = (factor * times_original - (factor - 1)) ** (num_rotated / (num_rotated - 2))
    rope |= {"rope_type": "linear", "factor": 1.0, "rope_theta": rope["rope_theta"] * stretch}
