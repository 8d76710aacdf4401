"""Draft heads for the targets of `tests/support/models.py`, saved as directories. The same arguments give the same
files.

There are random heads in every format, and copy heads. A copy head belongs to a target from `save_last_token_model` and
always proposes the target's greedy choice.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.head_parts import (
    MtpLayout,
    RandomTensors,
    Tensors,
    llama_config,
    mtp_config,
    mtp_names,
    mtp_prefixes,
    random_block,
    read_config,
    save_head,
    silent_block,
    vocabulary_tensors,
)
from tests.support.models import next_token_logits

Eagle3Style = Literal["midlayer", "layers", "sglang", "speculators"]
COPY_FAMILIES = ("eagle", "eagle3", "nextn", "mimo", "mimo_v2")
MULTI_LAYER_FAMILIES = ("nextn", "mimo_v2")
"""The families among COPY_FAMILIES whose heads may have several layers. Each layer reads the previous layer's output
and the target's hidden state.
"""


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
    """Saves a random EAGLE-3 head for the target in `target_dir`, and returns its directory.

    The head reads the input streams of the target layers in `captured_layers`. The config names them in the spelling of
    `style`; with None it does not mention them. With `draft_vocab_size` None the head has the whole vocabulary, and no
    d2t and t2d tensors. Heads that differ only in `style` have the same weights.
    """
    target = read_config(target_dir)
    vocab_size, width = target["vocab_size"], target["hidden_size"]
    size = hidden_size or width
    num_states = len(captured_layers or (0, 1, 2))
    random = RandomTensors(seed)
    tensors = {"fc.weight": random.weight(size, num_states * width)}
    tensors |= random_block(random, "midlayer.", target, size=size, input_size=2 * size, qkv_bias=qkv_bias)
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
    layer = llama_config(target, size=size, attention_bias=qkv_bias)
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
    target = read_config(target_dir)
    size = target["hidden_size"]
    random = RandomTensors(seed)
    tensors = {"fc.weight": random.weight(size, 2 * size)}
    if fc_bias:
        tensors["fc.bias"] = random.norm(size) - 1
    tensors |= random_block(random, "layers.0.", target, size=size, input_size=size, qkv_bias=qkv_bias)
    tensors["layers.0.post_attention_layernorm.weight"] = random.norm(size)
    if own_embedding:
        tensors["embed_tokens.weight"] = random.weight(target["vocab_size"], size)
    config = llama_config(target, size=size, model_type="qwen2" if qkv_bias else "llama")
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
    """Saves a random MTP head for the target in `target_dir`, and returns its directory.

    `step_spelling` uses Step-3.5's tensor names in the nextn layout. `with_target` puts the target's tensors into the
    same checkpoint.
    """
    target = read_config(target_dir)
    size, vocab_size = target["hidden_size"], target["vocab_size"]
    random = RandomTensors(seed)
    tensors: Tensors = {}
    for prefix in mtp_prefixes(target_dir, layout, num_layers):
        names = mtp_names(layout, step_spelling=step_spelling)
        tensors[f"{prefix}{names['fusion']}.weight"] = random.weight(size, 2 * size)
        for norm in ("embedding_norm", "hidden_norm", "input_norm", "mlp_norm", "output_norm"):
            tensors[f"{prefix}{names[norm]}.weight"] = random.norm(size)
        tensors |= random_block(random, prefix, target, size=size, input_size=size, qkv_bias=qkv_bias)
        if own_embedding:
            tensors[f"{prefix}embed_tokens.weight"] = random.weight(vocab_size, size)
        if own_output_head:
            tensors[f"{prefix}{names['output_head']}.weight"] = random.weight(vocab_size, size)
    if with_target:
        tensors |= load_file(target_dir / "model.safetensors")
    config = {**mtp_config(target, layout, num_layers), "attention_bias": qkv_bias}
    return save_head(directory, {**config, **config_changes}, tensors)


def save_copy_head(
    directory: Path,
    *,
    target_dir: Path,
    family: str,
    num_layers: int = 1,
    draft_vocab_size: int | None = None,
    is_swayed: bool = False,
) -> Path:
    """Saves a copy head of one of COPY_FAMILIES for a target of `save_last_token_model`. A copy head gives, for each
    token that it is fed, the target's logits after that token.

    Earlier inputs change nothing, so every step of a chain proposes the target's greedy choice. With `is_swayed` they
    do: every layer adds something that depends on its KV of all tokens, so the proposal is often another one.
    `num_layers` above 1 needs a family of MULTI_LAYER_FAMILIES. `draft_vocab_size` needs the family eagle3, and must
    not be smaller than the number of different greedy choices that the target has.
    """
    assert num_layers == 1 or family in MULTI_LAYER_FAMILIES
    assert draft_vocab_size is None or family == "eagle3"
    target = read_config(target_dir)
    weights = load_file(target_dir / "model.safetensors")
    if family == "eagle":
        config, tensors = _eagle1_copy(target, weights)
    elif family == "eagle3":
        config, tensors = _eagle3_copy(target, weights, _proposable(target_dir, draft_vocab_size))
    else:
        config, tensors = _mtp_copy(target_dir, weights, family, num_layers)  # type: ignore[arg-type]
    if is_swayed:
        _sway(tensors)
    return save_head(directory, config, tensors)


def _eagle1_copy(target: dict[str, Any], weights: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Returns the config and tensors of an EAGLE-1 copy head, which proposes the target's greedy choice. Its embedding
    is the target's embedding after the final norm, and its layer adds nothing to that.
    """
    size = target["hidden_size"]
    embedding = weights["model.embed_tokens.weight"]
    root = (embedding.pow(2).mean(-1, keepdim=True) + target["rms_norm_eps"]).rsqrt()
    tensors = {
        "embed_tokens.weight": embedding * root * weights["model.norm.weight"],
        "fc.weight": torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1),
        "layers.0.post_attention_layernorm.weight": torch.ones(size),
        **silent_block("layers.0.", target),
    }
    return {**llama_config(target, size=size), "architectures": ["LlamaForCausalLM"], "bias": False}, tensors


def _eagle3_copy(target: dict[str, Any], weights: Tensors, token_ids: Tensor) -> tuple[dict[str, Any], Tensors]:
    """Returns the config and tensors of an EAGLE-3 copy head, which proposes the target's greedy choice. Each token
    attends to itself alone, subtracts its hidden state and adds its embedding.

    There is one attention head as wide as the model. A key equals its query at the same token only: the rotary base is
    small, so another position turns every pair of dimensions differently.
    """
    size, vocab_size = target["hidden_size"], target["vocab_size"]
    one, none = torch.eye(size), torch.zeros(size, size)
    sharp = torch.cat([4 * one, none], dim=1)
    tensors = {
        "fc.weight": torch.zeros(size, 3 * size),
        "midlayer.input_layernorm.weight": torch.ones(size),
        "midlayer.hidden_norm.weight": torch.ones(size),
        "midlayer.post_attention_layernorm.weight": torch.ones(size),
        **silent_block("midlayer.", target),
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
        **llama_config(target, size=size),
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
    target = read_config(target_dir)
    size = target["hidden_size"]
    names = mtp_names(layout)
    parts = [torch.eye(size), torch.zeros(size, size)]
    tensors: Tensors = {}
    for prefix in mtp_prefixes(target_dir, layout, num_layers):
        tensors |= silent_block(prefix, target)
        for norm in ("embedding_norm", "hidden_norm", "input_norm", "mlp_norm"):
            tensors[f"{prefix}{names[norm]}.weight"] = torch.ones(size)
        tensors[f"{prefix}{names['output_norm']}.weight"] = weights["model.norm.weight"].clone()
        tensors[f"{prefix}{names['fusion']}.weight"] = torch.cat(parts[::-1] if layout == "mimo" else parts, dim=1)
    return {**mtp_config(target, layout, num_layers), "attention_bias": False}, tensors


def _sway(tensors: Tensors) -> None:
    """Changes a copy head's attention so that its guesses depend on all earlier tokens. Attention tensors that are zero
    get random weights. Query and key weights that are not zero (EAGLE-3) are scaled down: until then each token
    attended to itself alone.
    """
    random = RandomTensors(seed=5)
    for name in sorted(name for name in tensors if ".self_attn." in name):
        if not tensors[name].any():
            tensors[name] = (0.6 if "o_proj" in name else 1.0) * random.weight(*tensors[name].shape)
        elif "q_proj" in name or "k_proj" in name:
            tensors[name] = 0.18 * tensors[name]


def _proposable(target_dir: Path, draft_vocab_size: int | None) -> Tensor:
    """Returns the draft vocabulary's token ids in ascending order: every greedy choice of the target, then the highest
    other ids up to `draft_vocab_size`.

    The ids therefore differ from their indices in the draft vocabulary.
    """
    logits = next_token_logits(target_dir)
    if draft_vocab_size is None:
        return torch.arange(logits.shape[0])
    chosen = logits.argmax(-1).unique()
    assert chosen.numel() <= draft_vocab_size, f"the target has {chosen.numel()} greedy choices"
    others = [token for token in range(logits.shape[0]) if token not in set(chosen.tolist())]
    num_dropped = logits.shape[0] - draft_vocab_size
    return torch.tensor(sorted([*chosen.tolist(), *others[num_dropped:]]))
