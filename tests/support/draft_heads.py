"""Draft heads for the targets of `tests/support/models.py`, saved as directories. The same arguments, the same files.

Random ones in every format, and copy heads: of a target from `save_last_token_model` they propose the greedy choice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models import next_token_logits

Eagle3Style = Literal["midlayer", "layers", "sglang", "speculators"]
MtpLayout = Literal["nextn", "mimo", "mimo_v2"]
COPY_FAMILIES = ("eagle", "eagle3", "nextn", "mimo", "mimo_v2")
MULTI_LAYER_FAMILIES = ("nextn", "mimo_v2")
"""Of COPY_FAMILIES those that may have several layers: fed the previous layer's output, and the target's hidden."""
Tensors = dict[str, Tensor]


def save_eagle3_head(
    directory: Path,
    *,
    target_dir: Path,
    seed: int = 0,
    style: Eagle3Style = "midlayer",
    captured_layers: tuple[int, ...] | None = (0, 1, 2),
    draft_vocab_size: int | None = 48,
    hidden_size: int | None = None,
    own_embedding: bool = False,
    own_lm_head: bool = True,
    norm_before_fc: bool = False,
    fc_norm: bool = False,
    norm_before_residual: bool = False,
    norm_output: bool = False,
    qkv_bias: bool = False,
    **config_changes: Any,
) -> Path:
    """`captured_layers`: the streams ENTERING these layers, whichever way the style's config puts it; None: not said.

    `draft_vocab_size` None: the whole vocabulary, without d2t and t2d. Other styles of the same arguments have the same
    weights.
    """
    target = _config(target_dir)
    vocab_size, width = target["vocab_size"], target["hidden_size"]
    size = hidden_size or width
    num_states = len(captured_layers or (0, 1, 2))
    random = _Random(seed)
    tensors = {"fc.weight": random.weight(size, num_states * width)}
    tensors |= _random_block(random, "midlayer.", target, size=size, input_size=2 * size, qkv_bias=qkv_bias)
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = random.norm(size)
    if own_lm_head:
        tensors["lm_head.weight"] = random.weight(draft_vocab_size or vocab_size, size)
    if draft_vocab_size is not None:
        tensors |= vocabulary_tensors(random.choice(vocab_size, draft_vocab_size), vocab_size)
    if own_embedding:
        tensors["embed_tokens.weight"] = random.weight(vocab_size, size)
    if norm_before_fc:
        tensors["input_norm.weight"] = random.norm(num_states * width)
    if fc_norm:
        tensors |= {f"fc_norm.{state}.weight": random.norm(width) for state in range(num_states)}
    layer = _llama_config(target, size=size, attention_bias=qkv_bias)
    if qkv_bias:
        tensors["midlayer.self_attn.o_proj.bias"] = random.norm(size) - 1
    options: dict[str, Any] = {
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": width,
        "norm_before_fc": norm_before_fc,
        "fc_norm": fc_norm,
        "norm_before_residual": norm_before_residual,
        "norm_output": norm_output,
    }
    ids_key = "eagle_aux_hidden_state_layer_ids"
    if style == "sglang":
        options["architectures"] = ["LlamaForCausalLMEagle3"]
        options["eagle_config"] = {"use_aux_hidden_state": True}
        if captured_layers is not None:
            options["eagle_config"][ids_key] = [layer - 1 for layer in captured_layers]
            options["num_aux_hidden_states"] = len(captured_layers)
    elif captured_layers is not None:
        options[ids_key] = list(captured_layers)
    if style == "speculators":
        config: dict[str, Any] = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": target_dir.name}},
            "transformer_layer_config": layer,
            **options,
        }
    else:
        config = {**layer, "architectures": ["LlamaForCausalLM"], **options}
    if style in ("layers", "speculators"):
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return save_head(directory, {**config, **config_changes}, tensors)


def save_eagle1_head(
    directory: Path,
    *,
    target_dir: Path,
    seed: int = 0,
    own_embedding: bool = True,
    fc_bias: bool = True,
    qkv_bias: bool = False,
    **config_changes: Any,
) -> Path:
    target = _config(target_dir)
    size = target["hidden_size"]
    random = _Random(seed)
    tensors = {"fc.weight": random.weight(size, 2 * size)}
    if fc_bias:
        tensors["fc.bias"] = random.norm(size) - 1
    tensors |= _random_block(random, "layers.0.", target, size=size, input_size=size, qkv_bias=qkv_bias)
    tensors["layers.0.post_attention_layernorm.weight"] = random.norm(size)
    if own_embedding:
        tensors["embed_tokens.weight"] = random.weight(target["vocab_size"], size)
    config = _llama_config(target, size=size, model_type="qwen2" if qkv_bias else "llama")
    if not fc_bias:
        config["bias"] = False
    return save_head(directory, {**config, "architectures": ["LlamaForCausalLM"], **config_changes}, tensors)


def save_mtp_head(
    directory: Path,
    *,
    target_dir: Path,
    layout: MtpLayout,
    num_layers: int = 1,
    seed: int = 0,
    own_embedding: bool = False,
    own_output_head: bool = False,
    step_spelling: bool = False,
    with_target: bool = False,
    qkv_bias: bool = False,
    **config_changes: Any,
) -> Path:
    """`step_spelling`: Step-3.5's names in the nextn layout. `with_target`: in one checkpoint with the target."""
    target = _config(target_dir)
    size, vocab_size = target["hidden_size"], target["vocab_size"]
    random = _Random(seed)
    tensors: Tensors = {}
    for prefix in mtp_prefixes(target_dir, layout, num_layers):
        names = mtp_names(layout, step_spelling=step_spelling)
        tensors[f"{prefix}{names['fusion']}.weight"] = random.weight(size, 2 * size)
        for norm in ("embedding_norm", "hidden_norm", "input_norm", "mlp_norm", "output_norm"):
            tensors[f"{prefix}{names[norm]}.weight"] = random.norm(size)
        tensors |= _random_block(random, prefix, target, size=size, input_size=size, qkv_bias=qkv_bias)
        if own_embedding:
            tensors[f"{prefix}embed_tokens.weight"] = random.weight(vocab_size, size)
        if own_output_head:
            tensors[f"{prefix}{names['output_head']}.weight"] = random.weight(vocab_size, size)
    if with_target:
        tensors |= load_file(target_dir / "model.safetensors")
    config = {**_mtp_config(target, layout, num_layers), "attention_bias": qkv_bias}
    return save_head(directory, {**config, **config_changes}, tensors)


def save_copy_head(
    directory: Path,
    *,
    target_dir: Path,
    family: str,
    num_layers: int = 1,
    draft_vocab_size: int | None = None,
) -> Path:
    """One of COPY_FAMILIES for a target of `save_last_token_model`: fed token e, it gives the target's logits after e.

    Whatever was fed before changes nothing, so chained steps do the same. `num_layers`: of MULTI_LAYER_FAMILIES;
    `draft_vocab_size`: of eagle3, at least as many as the target has different greedy choices.
    """
    assert num_layers == 1 or family in MULTI_LAYER_FAMILIES
    assert draft_vocab_size is None or family == "eagle3"
    target = _config(target_dir)
    weights = load_file(target_dir / "model.safetensors")
    if family == "eagle":
        config, tensors = _eagle1_copy(target, weights)
    elif family == "eagle3":
        config, tensors = _eagle3_copy(target, weights, _proposable(target_dir, draft_vocab_size))
    else:
        config, tensors = _mtp_copy(target_dir, weights, family, num_layers)  # type: ignore[arg-type]
    return save_head(directory, config, tensors)


def _eagle1_copy(target: dict[str, Any], weights: Tensors) -> tuple[dict[str, Any], Tensors]:
    """The head's own embedding is the target's behind the final norm; nothing is added to it."""
    size = target["hidden_size"]
    embedding = weights["model.embed_tokens.weight"]
    root = (embedding.pow(2).mean(-1, keepdim=True) + target["rms_norm_eps"]).rsqrt()
    tensors = {
        "embed_tokens.weight": embedding * root * weights["model.norm.weight"],
        "fc.weight": torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1),
        "layers.0.post_attention_layernorm.weight": torch.ones(size),
        **_silent_block("layers.0.", target),
    }
    return {**_llama_config(target, size=size), "architectures": ["LlamaForCausalLM"], "bias": False}, tensors


def _eagle3_copy(target: dict[str, Any], weights: Tensors, token_ids: Tensor) -> tuple[dict[str, Any], Tensors]:
    """Each token attends to itself alone, and takes the hidden state away while it adds its embedding.

    One head as wide as the model: a key equals its query only at the same token, and at another position its rotation
    differs in every pair, as the base of the rotation is small.
    """
    size, vocab_size = target["hidden_size"], target["vocab_size"]
    one, none = torch.eye(size), torch.zeros(size, size)
    sharp = torch.cat([4 * one, none], dim=1)
    tensors = {
        "fc.weight": torch.zeros(size, 3 * size),
        "midlayer.input_layernorm.weight": torch.ones(size),
        "midlayer.hidden_norm.weight": torch.ones(size),
        "midlayer.post_attention_layernorm.weight": torch.ones(size),
        **_silent_block("midlayer.", target),
        "midlayer.self_attn.q_proj.weight": sharp,
        "midlayer.self_attn.k_proj.weight": sharp.clone(),
        "midlayer.self_attn.v_proj.weight": torch.cat([one, -one], dim=1),
        "midlayer.self_attn.o_proj.weight": one,
        "norm.weight": weights["model.norm.weight"],
        "lm_head.weight": weights["lm_head.weight"][token_ids],
    }
    if token_ids.numel() < vocab_size:
        tensors |= vocabulary_tensors(token_ids, vocab_size)
    config = {
        **_llama_config(target, size=size),
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": size,
        "rope_theta": 4.0,
        "draft_vocab_size": token_ids.numel(),
        "eagle_aux_hidden_state_layer_ids": [0, 1, target["num_hidden_layers"]],
    }
    return config, tensors


def _mtp_copy(target_dir: Path, weights: Tensors, layout: MtpLayout, num_layers: int) -> tuple[dict[str, Any], Tensors]:
    target = _config(target_dir)
    size = target["hidden_size"]
    names = mtp_names(layout)
    parts = [torch.eye(size), torch.zeros(size, size)]
    tensors: Tensors = {}
    for prefix in mtp_prefixes(target_dir, layout, num_layers):
        tensors |= _silent_block(prefix, target)
        for norm in ("embedding_norm", "hidden_norm", "input_norm", "mlp_norm"):
            tensors[f"{prefix}{names[norm]}.weight"] = torch.ones(size)
        tensors[f"{prefix}{names['output_norm']}.weight"] = weights["model.norm.weight"].clone()
        tensors[f"{prefix}{names['fusion']}.weight"] = torch.cat(parts[::-1] if layout == "mimo" else parts, dim=1)
    return {**_mtp_config(target, layout, num_layers), "attention_bias": False}, tensors


def _proposable(target_dir: Path, draft_vocab_size: int | None) -> Tensor:
    """Ascending ids: every greedy choice of the target, then others up to the size asked for."""
    logits = next_token_logits(target_dir)
    if draft_vocab_size is None:
        return torch.arange(logits.shape[0])
    chosen = logits.argmax(-1).unique()
    assert chosen.numel() <= draft_vocab_size, f"the target has {chosen.numel()} greedy choices"
    others = [token for token in range(logits.shape[0]) if token not in set(chosen.tolist())]
    return torch.tensor(sorted([*chosen.tolist(), *others[: draft_vocab_size - chosen.numel()]]))


def vocabulary_tensors(token_ids: Tensor, vocab_size: int) -> Tensors:
    """`d2t` and `t2d` of ascending target ids."""
    known = torch.zeros(vocab_size, dtype=torch.bool)
    known[token_ids] = True
    return {"d2t": token_ids - torch.arange(token_ids.numel()), "t2d": known}


def mtp_prefixes(target_dir: Path, layout: MtpLayout, num_layers: int) -> list[str]:
    first = _config(target_dir)["num_hidden_layers"] if layout == "nextn" else 0
    parent = {"nextn": "model.layers", "mimo": "model.mtp_layers", "mimo_v2": "model.mtp.layers"}[layout]
    return [f"{parent}.{first + layer}." for layer in range(num_layers)]


def mtp_names(layout: MtpLayout, *, step_spelling: bool = False) -> dict[str, str]:
    names = {
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "fusion": "eh_proj",
        "input_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "output_norm": "shared_head.norm",
        "output_head": "shared_head.head",
    }
    if step_spelling:
        names |= {"output_norm": "transformer.shared_head.norm", "output_head": "transformer.shared_head.output"}
    if layout == "mimo":
        names |= {"embedding_norm": "token_layernorm", "hidden_norm": "hidden_layernorm", "fusion": "input_proj"}
        names |= {"output_norm": "final_layernorm"}
    if layout == "mimo_v2":
        names |= {"mlp_norm": "pre_mlp_layernorm", "output_norm": "final_layernorm"}
    return names


def save_head(directory: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def load_head(directory: Path) -> tuple[dict[str, Any], Tensors]:
    """What `save_head` wrote."""
    return _config(directory), load_file(directory / "model.safetensors")


def without(tensors: Tensors, names: Iterable[str]) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in set(names)}


class _Random:
    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def weight(self, num_outputs: int, num_inputs: int) -> Tensor:
        return 1.5 * num_inputs**-0.5 * torch.randn((num_outputs, num_inputs), generator=self._generator)

    def norm(self, size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=self._generator)

    def choice(self, num_ids: int, num_chosen: int) -> Tensor:
        return torch.randperm(num_ids, generator=self._generator)[:num_chosen].sort().values


def _config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def _llama_config(target: dict[str, Any], *, size: int, **changes: Any) -> dict[str, Any]:
    """The target's heads, at `size`."""
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": target["vocab_size"],
        "hidden_size": size,
        "intermediate_size": target["intermediate_size"],
        "num_attention_heads": target["num_attention_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": _head_dim(target),
        "hidden_act": "silu",
        "rms_norm_eps": target["rms_norm_eps"],
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        **changes,
    }


def _mtp_config(target: dict[str, Any], layout: MtpLayout, num_layers: int) -> dict[str, Any]:
    return {
        **_llama_config(target, size=target["hidden_size"]),
        "model_type": {"nextn": "llama", "mimo": "mimo", "mimo_v2": "mimo_v2"}[layout],
        "num_hidden_layers": target["num_hidden_layers"],
        "num_nextn_predict_layers": num_layers,
    }


def _head_dim(target: dict[str, Any]) -> int:
    return int(target.get("head_dim") or target["hidden_size"] // target["num_attention_heads"])


def _block_shapes(prefix: str, target: dict[str, Any], *, size: int, input_size: int) -> dict[str, tuple[int, int]]:
    heads, kv = (target[key] * _head_dim(target) for key in ("num_attention_heads", "num_key_value_heads"))
    wide = target["intermediate_size"]
    shapes = {
        "self_attn.q_proj": (heads, input_size),
        "self_attn.k_proj": (kv, input_size),
        "self_attn.v_proj": (kv, input_size),
        "self_attn.o_proj": (size, heads),
        "mlp.gate_proj": (wide, size),
        "mlp.up_proj": (wide, size),
        "mlp.down_proj": (size, wide),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def _random_block(
    random: _Random, prefix: str, target: dict[str, Any], *, size: int, input_size: int, qkv_bias: bool
) -> Tensors:
    shapes = _block_shapes(prefix, target, size=size, input_size=input_size)
    tensors = {name: random.weight(*shape) for name, shape in shapes.items()}
    if qkv_bias:
        for name in ("q_proj", "k_proj", "v_proj"):
            num_outputs = shapes[f"{prefix}self_attn.{name}.weight"][0]
            tensors[f"{prefix}self_attn.{name}.bias"] = random.norm(num_outputs) - 1
    return tensors


def _silent_block(prefix: str, target: dict[str, Any]) -> Tensors:
    """Adds nothing to the residual stream."""
    size = target["hidden_size"]
    shapes = _block_shapes(prefix, target, size=size, input_size=size)
    return {name: torch.zeros(shape) for name, shape in shapes.items()}
