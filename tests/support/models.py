"""Tiny random target models with a tokenizer, saved as directories. The same arguments give the same files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

PAD, START, END, UNKNOWN = "<|pad|>", "<|start|>", "<|end|>", "<|unknown|>"
SPECIAL_TOKENS = (PAD, START, END, UNKNOWN)
PAD_ID, START_ID, END_ID = 0, 1, 2
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("e", "r"), ("Ġ", "the"), ("Ġ", "a"), ("an", "d"))
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256 + len(MERGES)
SMALL_VOCAB_SIZE = 64
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] %}{{ call['function'] | tojson }}{% endfor %}"
    "{{ '<|end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": PAD_ID,
    "bos_token_id": START_ID,
    "eos_token_id": END_ID,
    "dtype": "float32",
}
_WINDOW = 24
_ONE_OF_EACH = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": _WINDOW}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
_GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
"""Other heads in layers that attend all tokens than in those with a window."""
_CONFIGS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 32}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "phi3": (Phi3Config, {"sliding_window": None}),
    "mistral, windows": (MistralConfig, {"sliding_window": _WINDOW}),
    "phi3, windows": (Phi3Config, {"sliding_window": _WINDOW}),
    "qwen2, a window": (Qwen2Config, {"use_sliding_window": True, **_ONE_OF_EACH}),
    "gemma2": (Gemma2Config, {"head_dim": 16, "query_pre_attn_scalar": 24, **_ONE_OF_EACH}),
    "gemma3_text": (Gemma3TextConfig, {"head_dim": 32, "query_pre_attn_scalar": 24, **_ONE_OF_EACH}),
    "gemma4_text": (Gemma4TextConfig, {**_GEMMA4, **_ONE_OF_EACH}),
    "gpt_oss": (GptOssConfig, {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, **_ONE_OF_EACH}),
    "olmo2": (Olmo2Config, {}),
    "granite": (GraniteConfig, {"logits_scaling": 0.5, "residual_multiplier": 0.7, "embedding_multiplier": 3.0}),
    "mixtral": (MixtralConfig, {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3_moe": (Qwen3MoeConfig, {"head_dim": 32, "moe_intermediate_size": 32, **_EXPERTS}),
    "olmoe": (OlmoeConfig, _EXPERTS),
}
ARCHITECTURES = tuple(_CONFIGS)


def save_tiny_model(directory: Path, architecture: str, *, seed: int = 0, **config_changes: Any) -> Path:
    """Saves a random model of one of ARCHITECTURES. Its logits spread so widely that greedy choices seldom nearly
    tie.
    """
    config = _config(architecture, **config_changes)
    return save_model(directory, random_model(config, seed), config.vocab_size)


def save_last_token_model(
    directory: Path,
    *,
    architecture: str = "llama",
    vocab_size: int = SMALL_VOCAB_SIZE,
    seed: int = 0,
    logits_std: float = 1.5,
    context_weight: float = 0.0,
    mlp_weight: float = 0.0,
    disturbance: float = 0.0,
    **config_changes: Any,
) -> Path:
    """Saves a model whose next-token distribution depends on the last token only: its layers add nothing to the
    embedding.

    With `context_weight` above 0 the attention output is added, scaled by it, and every earlier token matters too.
    `mlp_weight` does the same for the output of the MLPs or experts.
    `disturbance` adds noise to the output weights, of that size relative to the logits, so that the same embeddings
    give other distributions.
    """
    config = _config(architecture, vocab_size=vocab_size, tie_word_embeddings=False, **config_changes)
    model = random_model(config, seed)
    with torch.no_grad():
        for name, weight in model.model.layers.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(context_weight if "o_proj" in name else mlp_weight)
        logits = _next_token_logits(model)
        model.lm_head.weight.mul_(logits_std / logits.std())
        noise = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(seed + 1))
        model.lm_head.weight.add_(noise * model.lm_head.weight.std() * disturbance)
    return save_model(directory, model, vocab_size)


def save_model(directory: Path, model: Any, vocab_size: int) -> Path:
    """Saves a transformers model, with the tokenizer of `make_tokenizer` for its vocabulary. Returns `directory`."""
    model.save_pretrained(str(directory))
    make_tokenizer(vocab_size).save_pretrained(str(directory))
    return directory


def next_token_logits(directory: Path) -> Tensor:
    """Returns the logits of a model of `save_last_token_model`, [vocab, vocab] float32. Row t holds those that follow
    token t.
    """
    return _next_token_logits(AutoModelForCausalLM.from_pretrained(str(directory), dtype=torch.float32))


def make_tokenizer(
    vocab_size: int = VOCAB_SIZE, *, merges: Sequence[tuple[str, str]] = MERGES
) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer with a few merges. If `vocab_size` is below VOCAB_SIZE, it knows single
    letters only and encodes everything else as <|unknown|>.
    """
    if vocab_size >= VOCAB_SIZE:
        symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    else:
        letters = "Ġ" + "abcdefghijklmnopqrstuvwxyz" + "ABCDEFGHIJKLMNOPQRSTUVWXYZ" + "0123456789"
        symbols = list(letters[: vocab_size - len(SPECIAL_TOKENS)])
        merges = ()
    vocab = {token: token_id for token_id, token in enumerate([*SPECIAL_TOKENS, *symbols])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
    )


def random_model(config: Any, seed: int = 0) -> Any:
    """Returns a transformers model with random float32 weights. Its logits spread as widely as those of
    `save_tiny_model`.
    """
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(noise * 2 * parameter.shape[1] ** -0.5)
    return model


def _config(architecture: str, **changes: Any) -> Any:
    new_config, of_architecture = _CONFIGS[architecture]
    return new_config(**{**_SHAPE, "tie_word_embeddings": False, **of_architecture, **changes})


@torch.no_grad()
def _next_token_logits(model: Any) -> Tensor:
    tokens = torch.arange(model.config.vocab_size).unsqueeze(1)
    logits: Tensor = model(tokens, use_cache=False).logits
    return logits[:, 0]
