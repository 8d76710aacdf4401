"""Converts a GGUF file's metadata to a config of transformers. Each key is mapped, known to have no effect, or refused.

GGUF stores a model's shape under keys with the architecture's name: `llama.block_count`. llama.cpp defines what a key
means. If transformers' model cannot compute it, the file is refused by this key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

_FREQUENCY_FACTORS = "rope_freqs.weight"
_SHORT_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_FACTORS = (_FREQUENCY_FACTORS, _SHORT_FACTORS, _LONG_FACTORS)
"""Tensors with the divisors of the rope frequencies, which are no weights of a model."""
_MISSING: Any = object()
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
"""Keys that an architecture may have, with the values at which they have no effect."""

_INFORMATION = re.compile(
    r"GGUF\.(version|tensor_count|kv_count)"
    r"|general\.(name|author|version|organization|finetune|basename|description|quantized_by|size_label|tags|languages"
    r"|url|doi|uuid|repo_url|file_type|quantization_version|alignment|datasets|parameter_count"
    r"|license(\.(name|link))?|source\..+|base_model\..+|dataset\..+|sampling\..+)"
    r"|tokenizer\.chat_template\..+|tokenizer\.chat_templates|split\.(no|tensors\.count)|quantize\.imatrix\..+|mradermacher\..+"
)
"""Matches keys that describe the file and have no effect on the computation."""

_WITHOUT_FREQUENCY_FACTORS = ("gpt2", "gemma2", "gemma3_text", "gpt_oss")
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""The number of layers by which llama.cpp recognises models whose queries are scaled by another size than a head's."""


class RefusedFile(Exception):
    """The file cannot be converted exactly; the message names the key or tensor."""


class Metadata:
    """The metadata of a GGUF file. Each key that was asked for counts as known; `refuse_unknown` refuses the others."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._known: set[str] = set()
        self.architecture: str = self.take("general.architecture", str)

    def take(self, key: str, kind: type, default: Any = _MISSING) -> Any:
        """Returns the key's value, or `default` if the file lacks the key.

        Raises RefusedFile if the value is not of type `kind`, or if the key is missing and there is no `default`. An
        int is converted where `kind` is float.
        """
        self._known.add(key)
        value: Any = self._values.get(key, _MISSING)
        if value is _MISSING:
            if default is _MISSING:
                raise RefusedFile(f"{key} is missing")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise RefusedFile(f"{key}: {_shown(value)} is not of type {kind.__name__}")
        return value

    def items(self, key: str, kind: type, default: Any = _MISSING) -> list[Any]:
        """Returns the key's value, a list, or `default` if the file lacks the key.

        Raises RefusedFile as `take` does, and if an item of the list is not of type `kind`.
        """
        items: list[Any] = self.take(key, list, default)
        wrong = next((item for item in items if type(item) is not kind), _MISSING)
        if wrong is not _MISSING:
            raise RefusedFile(f"{key}: {_shown(wrong)} is not of type {kind.__name__}")
        return items

    def own(self, name: str, kind: type, default: Any = _MISSING) -> Any:
        """Returns the value of a key that starts with the architecture's name. Raises as `take` does.

        `name` is the rest of the key: "block_count" stands for `llama.block_count`.
        """
        return self.take(f"{self.architecture}.{name}", kind, default)

    def positive(self, name: str, default: Any = _MISSING) -> float:
        """Returns the same value as `own`. Raises RefusedFile unless it is a finite number above 0."""
        value: float = self.own(name, float, default)
        if not 0 < value < math.inf:
            raise self.refuse(f"{self.architecture}.{name}", "is no positive number")
        return value

    def count(self, name: str, default: Any = _MISSING) -> int:
        """Returns the same value as `own`. Raises RefusedFile unless it is a positive integer.

        A list that has the same number for every layer is read as this number.
        """
        key = f"{self.architecture}.{name}"
        value = self._values.get(key)
        if isinstance(value, list) and value:
            if any(one != value[0] for one in value):
                raise RefusedFile(f"{key}: layers that differ are not supported")
            value = value[0]
            self._known.add(key)
        else:
            value = self.take(key, int, default)
        if type(value) is not int or value < 1:
            raise RefusedFile(f"{key}: {_shown(value)} is no count")
        return value

    def refuse(self, key: str, reason: str) -> RefusedFile:
        return RefusedFile(f"{key}: {_shown(self._values.get(key))} {reason}")

    def refuse_unknown(self, prefix: str = "") -> None:
        """Raises RefusedFile for the first unknown key with this prefix that may have an effect on the computation."""
        for key, value in self._values.items():
            if not key.startswith(prefix) or key in self._known or _INFORMATION.fullmatch(key):
                continue
            neutral = _NEUTRAL.get(key.removeprefix(f"{self.architecture}."), ())
            if not any(type(value) is type(one) and value == one for one in neutral):
                raise self.refuse(key, "is not supported")


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


@dataclass(frozen=True, slots=True)
class Tensors:
    """The names and shapes of the file's tensors."""

    shapes: Mapping[str, tuple[int, ...]]

    def has_any(self, pattern: str) -> bool:
        return any(re.fullmatch(pattern, name) for name in self.shapes)

    def size(self, name: str, dimension: int) -> int:
        if name not in self.shapes:
            raise RefusedFile(f"the tensor {name} is missing")
        if len(self.shapes[name]) <= dimension:
            raise RefusedFile(f"the tensor {name} has the shape {list(self.shapes[name])}")
        return self.shapes[name][dimension]


def read_values(tensor: gguf.ReaderTensor) -> np.ndarray:
    """Returns a tensor's values in float32. Raises RefusedFile if its type cannot be converted."""
    kind = tensor.tensor_type.name
    if kind in ("I8", "I16", "I32", "I64"):
        raise RefusedFile(f"the tensor {tensor.name} is of type {kind}")
    try:
        return gguf.dequantize(tensor.data, tensor.tensor_type).copy()
    except NotImplementedError as error:
        raise RefusedFile(f"the tensor {tensor.name} is of type {kind}, which is not supported") from error


def config_fields(keys: Metadata, tensors: Tensors, factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns `model_type` and the other fields of the model's config, as transformers names them.

    `factors` has those of ROPE_FACTORS that the file has. Raises RefusedFile for an unknown architecture.
    """
    build = _ARCHITECTURES.get(keys.architecture)
    if build is None:
        known = ", ".join(_ARCHITECTURES)
        raise RefusedFile(f"general.architecture: {keys.architecture!r} is not supported; {known} are")
    fields = build(keys, tensors)
    vocab_size, num_layers = tensors.size("token_embd.weight", 0), keys.count("block_count")
    if keys.count("vocab_size", vocab_size) != vocab_size:
        raise keys.refuse(f"{keys.architecture}.vocab_size", f"where there are {vocab_size} embeddings")
    num_blocks = len({name.split(".")[1] for name in tensors.shapes if name.startswith("blk.")})
    if num_layers != num_blocks:
        raise keys.refuse(f"{keys.architecture}.block_count", f"layers, where the file has tensors of {num_blocks}")
    is_phi3 = fields["model_type"] == "phi3"
    for name in factors:
        if fields["model_type"] in _WITHOUT_FREQUENCY_FACTORS or (name != _FREQUENCY_FACTORS and not is_phi3):
            raise RefusedFile(f"the tensor {name} is not supported for {keys.architecture}")
    if fields["model_type"] != "gpt2":
        fields["rope_parameters"] = _rope_of_layers(keys, fields, _rope(keys, fields, factors))
    return {
        "tie_word_embeddings": "output.weight" not in tensors.shapes,
        **fields,
        "vocab_size": vocab_size,
        "max_position_embeddings": keys.count("context_length"),
        "hidden_size": keys.count("embedding_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": keys.count("attention.head_count"),
    }


def _rotating(keys: Metadata) -> dict[str, Any]:
    """Returns those fields of the config that all architectures with rotary positions have."""
    num_heads = keys.count("attention.head_count")
    head_dim = keys.count("attention.key_length", keys.count("embedding_length") // num_heads)
    if keys.count("attention.value_length", head_dim) != head_dim:
        raise keys.refuse(f"{keys.architecture}.attention.value_length", f"is not that of keys, {head_dim},")
    num_kv_heads = keys.count("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise keys.refuse(f"{keys.architecture}.attention.head_count_kv", f"of {num_heads} heads")
    return {
        "intermediate_size": keys.count("feed_forward_length"),
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
    }


def _decoder(keys: Metadata) -> dict[str, Any]:
    """Returns those fields of the config that all architectures with rotary positions and RMS norms have."""
    return {**_rotating(keys), "rms_norm_eps": keys.positive("attention.layer_norm_rms_epsilon")}


def _attention_bias(tensors: Tensors) -> dict[str, bool]:
    return {"attention_bias": tensors.has_any(r"blk\.\d+\.attn_(q|k|v|output)\.bias")}


def _window(keys: Metadata, default: Any = 0) -> int | None:
    """Returns the number of tokens in the layers' sliding windows, or None if the key is 0, which means no window."""
    window: int = keys.own("attention.sliding_window", int, default)
    if window < 0:
        raise keys.refuse(f"{keys.architecture}.attention.sliding_window", "is no length")
    return window or None


def _windows(keys: Metadata, window: int | None, period: int) -> dict[str, Any]:
    """Returns the config's fields for a model in which every `period`th layer attends in full, the others in windows.

    `attention.sliding_window_pattern` is the file's period, if it has one. All layers attend in full if `window` is
    None.
    """
    name = "attention.sliding_window_pattern"
    period = keys.own(name, int, period)
    if period < 1:
        raise keys.refuse(f"{keys.architecture}.{name}", "is no number of layers")
    layers = range(1, keys.count("block_count") + 1)
    if window is None:
        return {"layer_types": ["full_attention" for _ in layers]}
    layer_types = ["sliding_attention" if layer % period else "full_attention" for layer in layers]
    return {"sliding_window": window, "layer_types": layer_types}


def _gemma(keys: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns those fields of the config that Gemma 2 and Gemma 3 have in common. `fields` are those of `_decoder`."""
    is_27b = keys.count("block_count") == _LAYERS_OF_27B[keys.architecture]
    width = keys.count("embedding_length") // keys.count("attention.head_count")
    return {"query_pre_attn_scalar": width if is_27b else fields["head_dim"], **fields}


def _experts(keys: Metadata, num_experts: str) -> dict[str, Any]:
    if keys.own("expert_gating_func", int, 1) != 1:
        raise keys.refuse(f"{keys.architecture}.expert_gating_func", "is not softmax")
    count, used = keys.count("expert_count"), keys.count("expert_used_count")
    if used > count:
        raise keys.refuse(f"{keys.architecture}.expert_used_count", f"of {count} experts")
    return {num_experts: count, "num_experts_per_tok": used}


def _llama(keys: Metadata, tensors: Tensors) -> dict[str, Any]:
    fields, window = _decoder(keys), _window(keys)
    if keys.own("expert_count", int, 0) > 0:
        if keys.count("expert_feed_forward_length", fields["intermediate_size"]) != fields["intermediate_size"]:
            raise keys.refuse("llama.expert_feed_forward_length", "is not feed_forward_length")
        return {"model_type": "mixtral", "sliding_window": window, **_experts(keys, "num_local_experts"), **fields}
    if window is not None:
        return {"model_type": "mistral", "sliding_window": window, **fields}
    mlp_bias = tensors.has_any(r"blk\.\d+\.ffn_(gate|up|down)\.bias")
    return {"model_type": "llama", "mlp_bias": mlp_bias, **_attention_bias(tensors), **fields}


def _qwen2(keys: Metadata, tensors: Tensors) -> dict[str, Any]:
    return {"model_type": "qwen2", **_decoder(keys)}


def _qwen3(keys: Metadata, tensors: Tensors) -> dict[str, Any]:
    return {"model_type": "qwen3", **_attention_bias(tensors), **_decoder(keys)}


def _qwen2moe(keys: Metadata, tensors: Tensors) -> dict[str, Any]:
    shared = tensors.size("blk.0.ffn_up_shexp.weight", 0)
    return {
        "model_type": "qwen2_moe",
        "moe_intermediate_size": keys.count("expert_feed_forward_length", tensors.size("blk.0.ffn_up_exps.weight", 1)),
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length", shared),
        "norm_topk_prob": keys.own("expert_weights_norm", bool, False),
        **_experts(keys, "num_experts"),
        **_decoder(keys),
    }


def _qwen3moe(keys: Metadata, tensors: Tensors) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "moe_intermediate_size": keys.count("expert_feed_forward_length", tensors.size("blk.0.ffn_up_exps.weight", 1)),
        "norm_topk_prob": keys.own("expert_weights_norm", bool, True),
        **_attention_bias(tensors),
        **_experts(keys, "num_experts"),
        **_decoder(keys),
    }


def _phi3(keys: Metadata, tensors: Tensors) -> dict[str, Any]:
    return {"model_type": "phi3", "sliding_window": _window(keys), **_decoder(keys)}


def _starcoder2(keys: Metadata, tensors: Tensors) -> dict[str, Any]:
    return {
        "model_type": "starcoder2",
        "sliding_window": _window(keys),
        "use_bias": tensors.has_any(r"blk\.\d+\.(attn|ffn)_(q|k|v|output|up|down)\.bias"),
        "norm_epsilon": keys.positive("attention.layer_norm_epsilon"),
        **_rotating(keys),
    }


def _gpt2(keys: Metadata, tensors: Tensors) -> dict[str, Any]:
    num_heads = keys.count("attention.head_count")
    head_dim = keys.count("embedding_length") // num_heads
    for name, size in (("head_count_kv", num_heads), ("key_length", head_dim), ("value_length", head_dim)):
        if keys.count(f"attention.{name}", size) != size:
            raise keys.refuse(f"gpt2.attention.{name}", f"where {size} is all that is supported")
    return {
        "model_type": "gpt2",
        "n_inner": keys.count("feed_forward_length"),
        "layer_norm_epsilon": keys.positive("attention.layer_norm_epsilon"),
    }


def _gemma2(keys: Metadata, tensors: Tensors) -> dict[str, Any]:
    return {
        "model_type": "gemma2",
        "tie_word_embeddings": True,
        "attn_logit_softcapping": keys.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.positive("final_logit_softcapping", 30.0),
        **_windows(keys, _window(keys, 4096), 2),
        **_gemma(keys, _decoder(keys)),
    }


def _gemma3(keys: Metadata, tensors: Tensors) -> dict[str, Any]:
    softcap = keys.own("final_logit_softcapping", float, 0.0)
    return {
        "model_type": "gemma3_text",
        "final_logit_softcapping": keys.positive("final_logit_softcapping") if softcap else None,
        **_windows(keys, _window(keys), 6),
        **_gemma(keys, _decoder(keys)),
    }


def _gpt_oss(keys: Metadata, tensors: Tensors) -> dict[str, Any]:
    fields = _decoder(keys)
    size = keys.count("expert_feed_forward_length", fields["intermediate_size"])
    return {
        "model_type": "gpt_oss",
        **_windows(keys, _window(keys, _MISSING), 2),
        **_experts(keys, "num_local_experts"),
        **fields,
        "intermediate_size": size,
    }


_ARCHITECTURES: dict[str, Callable[[Metadata, Tensors], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "phi3": _phi3,
    "starcoder2": _starcoder2,
    "gpt2": _gpt2,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
}


def _rope_of_layers(keys: Metadata, fields: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Returns the config's rope parameters, where those of layers that attend in full are `rope`."""
    prefix = f"{keys.architecture}.rope"
    if fields["model_type"] == "gemma3_text":
        if rope["rope_type"] not in ("default", "linear"):
            raise keys.refuse(f"{prefix}.scaling.type", "is not supported for gemma3")
        theta = keys.positive("rope.freq_base_swa", 10000.0)
        return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}
    if "layer_types" in fields and keys.positive("rope.freq_base_swa", rope["rope_theta"]) != rope["rope_theta"]:
        raise keys.refuse(f"{prefix}.freq_base_swa", "is not rope.freq_base")
    if fields["model_type"] == "gpt_oss" and rope["rope_type"] == "yarn":
        return {**rope, "truncate": False}
    return rope


def _rope(keys: Metadata, fields: dict[str, Any], factors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    head_dim, prefix = fields["head_dim"], f"{keys.architecture}.rope"
    num_rotated = keys.count("rope.dimension_count", head_dim)
    rope: dict[str, Any] = {"rope_theta": keys.positive("rope.freq_base", 10000.0)}
    if num_rotated != head_dim:
        if fields["model_type"] != "phi3" or num_rotated > head_dim or num_rotated % 2:
            raise keys.refuse(f"{prefix}.dimension_count", f"of {head_dim} dimensions of a head")
        rope["partial_rotary_factor"] = num_rotated / head_dim
    factor = keys.own("rope.scaling.factor", float, None)
    original = keys.own("rope.scaling.original_context_length", int, None)
    scales = factor not in (None, 0.0, 1.0)
    has_lengths = _SHORT_FACTORS in factors or _LONG_FACTORS in factors
    kind = keys.own("rope.scaling.type", str, "linear" if scales else "longrope" if has_lengths else "none")
    if has_lengths:
        if kind != "longrope" or scales or _FREQUENCY_FACTORS in factors:
            raise keys.refuse(f"{prefix}.scaling.type", f"beside the tensors {_SHORT_FACTORS} and {_LONG_FACTORS}")
        return {**rope, **_longrope(keys, fields, factors, num_rotated)}
    frequency_factors = factors.get(_FREQUENCY_FACTORS)
    if kind not in ("none", "linear", "yarn"):
        raise keys.refuse(f"{prefix}.scaling.type", "is not supported")
    if kind == "none":
        if scales:
            raise keys.refuse(f"{prefix}.scaling.factor", "of a rope without scaling")
        if frequency_factors is None:
            return {"rope_type": "default", **rope}
        if num_rotated != head_dim:
            raise RefusedFile(f"{_FREQUENCY_FACTORS}: not supported for a part of a head's dimensions")
        return _llama3_rope(frequency_factors, head_dim, rope["rope_theta"], original)
    if frequency_factors is not None:
        raise keys.refuse(f"{prefix}.scaling.type", f"beside the tensor {_FREQUENCY_FACTORS}")
    if factor is None or not 1.0 <= factor < math.inf:
        raise keys.refuse(f"{prefix}.scaling.factor", f"is no factor of {kind} rope")
    rope = {"rope_type": kind, "factor": factor, **rope}
    if kind == "linear":
        return rope
    if original is None or original < 1:
        raise keys.refuse(f"{prefix}.scaling.original_context_length", "is no length")
    return {
        **rope,
        "original_max_position_embeddings": original,
        "beta_fast": keys.positive("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.positive("rope.scaling.yarn_beta_slow", 1.0),
    }


def _longrope(
    keys: Metadata, fields: dict[str, Any], factors: Mapping[str, np.ndarray], num_rotated: int
) -> dict[str, Any]:
    """Returns the rope parameters of Phi-3 that are of type longrope.

    It also writes the original length into `fields`, because Phi-3 reads it there.
    """
    for name in (_SHORT_FACTORS, _LONG_FACTORS):
        values = factors.get(name)
        if values is None or values.shape != (num_rotated // 2,) or not (values > 0).all():
            raise RefusedFile(f"{name}: not {num_rotated // 2} factors above 0")
    original = keys.count("rope.scaling.original_context_length")
    fields["original_max_position_embeddings"] = original
    return {
        "rope_type": "longrope",
        "short_factor": factors[_SHORT_FACTORS].tolist(),
        "long_factor": factors[_LONG_FACTORS].tolist(),
        "original_max_position_embeddings": original,
        "attention_factor": keys.positive("rope.scaling.attn_factor", 1.0),
    }


def _llama3_rope(factors: np.ndarray, head_dim: int, theta: float, original: int | None) -> dict[str, Any]:
    """Returns rope parameters with which transformers divides frequency i by `factors[i]`: of type llama3, or the
    default if all factors are 1.

    llama.cpp stores the factors and not the parameters. So this function tries several parameters, and compares the
    frequencies that transformers computes from them. `original` is the original context length, if the file has it.
    Raises RefusedFile if no parameters fit.
    """
    import torch  # these take seconds to import, and few files need them
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if factors.shape != (head_dim // 2,) or not np.all(np.isfinite(factors)) or factors.min() < 1.0:
        raise RefusedFile(f"{_FREQUENCY_FACTORS}: not {head_dim // 2} factors of 1 or more")
    factors = factors.astype(np.float64)
    if factors.max() == 1.0:
        return {"rope_type": "default", "rope_theta": theta}
    per_token = theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)
    largest = float(factors.max())
    candidates = [(largest, 1.0, 4.0, length) for length in (original or 8192, 8192)]
    for factor in (largest, 2 * largest):
        band = _band(per_token, (1 / factors - 1 / factor) / (1 - 1 / factor))
        if band is not None:
            candidates.append((factor, band[0] * 8192, band[1] * 8192, 8192))
    for factor, low, high, length in candidates:
        rope = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": length,
        }
        config = LlamaConfig(head_dim=head_dim, rope_parameters=dict(rope))
        computed, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        if np.allclose(computed.numpy(), 2 * math.pi * per_token / factors, rtol=2e-6, atol=0.0):
            return rope
    raise RefusedFile(f"{_FREQUENCY_FACTORS}: these factors are not those of a rope of type llama3")


def _band(per_token: np.ndarray, kept: np.ndarray) -> tuple[float, float] | None:
    """Returns the ends (low, high) of the band of frequencies in which `kept` rises from 0 to 1, linearly with the
    frequency. They are in turns per token. Returns None if no line fits.

    `per_token` [N] are rope frequencies, in turns per token. `kept` [N] tells how each is scaled: 0 for a frequency
    that is divided by the whole factor, 1 for one that is unchanged. Two values inside the band determine the line;
    with fewer, the function takes one of the lines that fit.
    """
    below, above = kept < 1e-6, kept > 1 - 1e-6
    slowest = float(per_token[below].max(initial=0.0))
    fastest = float(per_token[above].min(initial=4 * float(per_token.max())))
    turns, shares = per_token[~below & ~above], kept[~below & ~above]
    if len(turns) >= 2:
        slope, at_zero = np.polyfit(turns, shares, 1)
        low, high = -at_zero / slope, (1 - at_zero) / slope
    elif len(turns) == 1:
        width = min((turns[0] - slowest) / shares[0], (fastest - turns[0]) / (1 - shares[0])) / 2
        low, high = turns[0] - shares[0] * width, turns[0] + (1 - shares[0]) * width
    else:
        low, high = slowest + (fastest - slowest) / 3, slowest + (fastest - slowest) * 2 / 3
    return (float(low), float(high)) if 0 <= low < high else None
