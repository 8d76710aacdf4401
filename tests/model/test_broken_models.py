"""Tests that every defect of a model directory ends the start with one line that names the file and the field. No value
is made up.

Each case breaks a tiny Llama that would otherwise load: hidden size 64, 2 layers, untied.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, MixtralConfig

from common.errors import StartupError, UnsupportedModel
from tests.model.paged_model import PagedModel
from tests.support.draft_heads import save_eagle1_head, save_eagle3_head, save_mtp_head
from tests.support.loading import load_target
from tests.support.models import VOCAB_SIZE, make_tokenizer, random_model, save_tiny_model

Tensors = dict[str, Tensor]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BOUND_S = 10.0  # a refusal takes milliseconds; building a model of ten million layers took minutes


@dataclass(frozen=True)
class Model:
    """A model's directory, with methods that change it."""

    path: Path

    def config(self, **changes: Any) -> None:
        self.json("config.json", lambda config: config.update(changes))

    def json(self, name: str, change: Callable[[dict[str, Any]], None]) -> None:
        content = json.loads((self.path / name).read_text())
        change(content)
        (self.path / name).write_text(json.dumps(content))

    def write(self, name: str, content: str | bytes) -> None:
        (self.path / name).write_bytes(content.encode() if isinstance(content, str) else content)

    def tensors(self, change: Callable[[Tensors], object], name: str = WEIGHTS) -> None:
        tensors = load_file(self.path / name)
        change(tensors)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, self.path / name, {"format": "pt"})

    def without(self, *names: str) -> None:
        self.tensors(lambda tensors: [tensors.pop(name) for name in names])

    def cut(self, name: str, num_bytes: int) -> None:
        self.write(name, (self.path / name).read_bytes()[:num_bytes])

    def shard(self) -> None:
        """Splits the weights into two files and an index, as on model hubs."""
        tensors = load_file(self.path / WEIGHTS)
        (self.path / WEIGHTS).unlink()
        names = sorted(tensors)
        weight_map = {}
        for file, part in (("model-1.safetensors", names[:5]), ("model-2.safetensors", names[5:])):
            save_file({name: tensors[name] for name in part}, self.path / file, {"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        self.write(INDEX, json.dumps({"metadata": {}, "weight_map": weight_map}))


def change_weights(**changes: Callable[[Tensor], Tensor]) -> Callable[[Model], None]:
    def change(tensors: Tensors) -> None:
        for name, new in changes.items():
            tensors[name] = new(tensors[name])

    return lambda model: model.tensors(change)


def weights(name: str, new: Callable[[Tensor], Tensor]) -> Callable[[Model], None]:
    return change_weights(**{name: new})


def config(**changes: Any) -> Callable[[Model], None]:
    return lambda model: model.config(**changes)


def absent(*names: str) -> Callable[[Model], None]:
    return lambda model: model.without(*names)


def added(**tensors: Tensor) -> Callable[[Model], None]:
    return lambda model: model.tensors(lambda there: there.update(tensors))


def written(name: str, content: str | bytes) -> Callable[[Model], None]:
    return lambda model: model.write(name, content)


def renamed(change: Callable[[str], str]) -> Callable[[Model], None]:
    def rename(tensors: Tensors) -> None:
        there = dict(tensors)
        tensors.clear()
        tensors.update({change(name): tensor for name, tensor in there.items()})

    return lambda model: model.tensors(rename)


def sharded(then: Callable[[Model], object]) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        model.shard()
        then(model)

    return change


def replaced_by_directory(name: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        (model.path / name).unlink()
        (model.path / name).mkdir()

    return change


def replaced_by_pipe(model: Model) -> None:
    (model.path / WEIGHTS).unlink()
    os.mkfifo(model.path / WEIGHTS)


def nan_at(place: int, value: float = float("nan")) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(-1)[place] = value
        return changed

    return change


def index_map(change: Callable[[dict[str, Any]], object]) -> Callable[[Model], None]:
    return sharded(lambda model: model.json(INDEX, lambda index: change(index["weight_map"]) and None))


def token_past_the_vocabulary(model: Model) -> None:
    token = {"id": VOCAB_SIZE, "content": "<new>", "special": True, "normalized": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    model.json("tokenizer.json", lambda tokenizer: tokenizer["added_tokens"].append({**token, **flags}))


def tokenizer_of_a_larger_model(model: Model) -> None:
    make_tokenizer().save_pretrained(str(model.path))
    model.tensors(lambda tensors: tensors.update({name: tensors[name][:64].clone() for name in (HEAD, EMBEDDINGS)}))
    model.config(vocab_size=64)


DOWN = "model.layers.1.mlp.down_proj.weight"
NORM, HEAD, EMBEDDINGS = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
THIRD_LAYER = {"model.layers.2.input_layernorm.weight": torch.ones(64)}
INF = float("inf")

WEIGHT_DEFECTS: dict[str, tuple[Callable[[Model], None], str]] = {
    "a-projection-missing": (absent(DOWN), f"{DOWN} missing from {WEIGHTS}"),
    "untied-output-missing": (absent(HEAD), HEAD),
    "a-layer-missing": (lambda m: m.config(num_hidden_layers=3), r"model.layers.2.\S+, .* and 6 more missing from"),
    "embeddings-tied-and-both-missing": (
        lambda m: (m.config(tie_word_embeddings=True), m.without(HEAD, EMBEDDINGS))[0],
        EMBEDDINGS,
    ),
    "a-bias-asked-for": (config(attention_bias=True), r"q_proj.bias|k_proj.bias"),
    "a-foreign-prefix": (renamed(lambda name: f"foreign.{name}"), r"model\.\S+ .*missing|missing"),
    "one-key-under-a-foreign-prefix": (renamed(lambda name: name.replace(NORM, f"foreign.{NORM}")), NORM),
    "a-surplus-tensor": (added(extra=torch.ones(3)), f"{WEIGHTS}: not known in LlamaForCausalLM: extra"),
    "a-surplus-layer": (added(**THIRD_LAYER), r"not known in LlamaForCausalLM: model\.layers\.2\.input_layernorm"),
    "layers-left-out": (config(num_hidden_layers=1), r"not known in LlamaForCausalLM: model\.layers\.1\..* and 6 more"),
    "the-same-tensor-by-two-names": (added(**{"norm.weight": torch.ones(64)}), rf"norm.weight is {NORM}"),
    "integer-weights": (weights(DOWN, lambda w: w.to(torch.int8)), f"{DOWN} is of I8"),
    "boolean-weights": (weights(DOWN, lambda w: w > 0), f"{DOWN} is of BOOL"),
    "fp8-weights-of-the-other-kind": (weights(DOWN, lambda w: w.to(torch.float8_e5m2)), f"{DOWN} is of F8_E5M2"),
    "scales-of-quantised-weights": (added(**{f"{DOWN}_scale_inv": torch.ones(1)}), rf"not known .*{DOWN}_scale_inv"),
    "other-kv-heads": (
        config(num_key_value_heads=4),
        r"k_proj.weight is \[32, 64\], which config.json says is \[64, 64\]",
    ),
    "fp8-weights": (weights(DOWN, lambda w: w.to(torch.float8_e4m3fn)), f"{DOWN} is of F8_E4M3.*quantised"),
    "nan-weights": (weights(DOWN, nan_at(17)), f"{DOWN} has NaN"),
    "infinite-weights": (weights(NORM, nan_at(-1, INF)), f"{NORM} has NaN or infinite"),
    "another-shape": (weights(DOWN, lambda w: w[:, :-1]), rf"{WEIGHTS}: {DOWN} is \[64, 95\], which .* is \[64, 96\]"),
    "a-narrower-vocabulary": (weights(EMBEDDINGS, lambda w: w[:-1]), EMBEDDINGS),
    "a-scalar": (weights(NORM, lambda w: w[0].clone()), NORM),
    "empty-weights-file": (written(WEIGHTS, b""), WEIGHTS),
    "cut-weights-file": (lambda m: m.cut(WEIGHTS, 100_000), f"{WEIGHTS}: cannot be read, fetch it again"),
    "weights-file-of-text": (written(WEIGHTS, "version https://git-lfs.github.com/spec/v1\noid sha256:1\n"), WEIGHTS),
    "no-tensors": (lambda m: m.tensors(lambda tensors: tensors.clear()), "hold no tensors"),
    "no-weights-file": (lambda m: (m.path / WEIGHTS).unlink(), f"neither {WEIGHTS} nor"),
    "only-a-pickle": (
        lambda m: (m.path / WEIGHTS).rename(m.path / "pytorch_model.bin") and None,
        "it has pytorch_model.bin",
    ),
    "weights-are-a-directory": (replaced_by_directory(WEIGHTS), WEIGHTS),
    "weights-are-a-pipe": (replaced_by_pipe, WEIGHTS),
    "shard-missing": (sharded(lambda m: (m.path / "model-2.safetensors").unlink()), "model-2.safetensors: there is no"),
    "shard-cut": (sharded(lambda m: m.cut("model-2.safetensors", 9000)), "model-2.safetensors: cannot be read"),
    "index-names-the-wrong-shard": (
        index_map(lambda names: names.update({NORM: "model-1.safetensors"})),
        f"model-1.safetensors: lacks {NORM}",
    ),
    "index-names-a-tensor-of-none": (index_map(lambda names: names.update(x="model-1.safetensors")), "lacks x"),
    "a-tensor-in-two-shards": (
        sharded(lambda m: m.tensors(lambda t: t.update({NORM: torch.ones(64)}), "model-1.safetensors")),
        f"model-2.safetensors: {NORM} is in model-1.safetensors too",
    ),
    "index-outside-the-directory": (index_map(lambda names: names.update(x="../x.safetensors")), INDEX),
    "index-of-no-name": (index_map(lambda names: names.update(x="")), f"{INDEX}: weight_map: x is in no"),
    "index-of-a-name-that-is-none": (
        index_map(lambda names: names.update(x="a\0.safetensors")),
        f"{INDEX}: weight_map: x",
    ),
    "index-of-another-kind-of-file": (
        index_map(lambda names: names.update(x="config.json")),
        f"{INDEX}: weight_map: x",
    ),
    "index-of-a-name-without-end": (
        index_map(lambda n: n.update(x=f"{'a' * 5000}.safetensors")),
        f"{INDEX}: weight_map: x",
    ),
    "index-of-a-file-that-is-absent": (
        index_map(lambda names: names.update({NORM: "model-3.safetensors"})),
        "model-3.safetensors: there is no such file",
    ),
    "index-without-a-shard": (
        index_map(lambda names: [names.pop(name) for name in list(names) if names[name] == "model-1.safetensors"]),
        "missing from model-2.safetensors",
    ),
    "index-of-numbers": (index_map(lambda names: names.update(x=7)), INDEX),
    "index-is-no-json": (sharded(lambda m: m.write(INDEX, "{")), INDEX),
    "index-is-a-list": (sharded(lambda m: m.write(INDEX, "[]")), INDEX),
    "index-without-a-map": (sharded(lambda m: m.write(INDEX, "{}")), f"{INDEX}: weight_map"),
    "both-whole-and-sharded": (
        lambda m: (
            shutil.copy(m.path / WEIGHTS, m.path / "kept"),
            m.shard(),
            (m.path / "kept").rename(m.path / WEIGHTS),
        )[1],
        f"{WEIGHTS} beside {INDEX}",
    ),
}

NAN, MANY = float("nan"), 10_000_000
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def rope(**fields: Any) -> Callable[[Model], None]:
    return config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, **fields})


SIZES: dict[str, Sequence[Any]] = {
    "num_hidden_layers": (0, -1, "2", 1.5, True),
    "hidden_size": (-64, [64], 1 << 30, 1 << 40),
    "vocab_size": (0, 1 << 31),
    "intermediate_size": (1 << 31,),
    "num_attention_heads": (0,),
    "num_key_value_heads": (0,),
    "head_dim": (0, 1 << 31),
    "max_position_embeddings": (0, "4096", 1 << 80),
}
OF_OTHER_ARCHITECTURES: dict[str, Any] = {
    "logits_scaling": 9.0,
    "final_logit_softcapping": 30.0,
    "no_rope_layers": [1, 0],
    "rope_interleaved": True,
    "qk_norm": True,
    "no_rope_layer_interval": 2,
    "window_size": 64,
    "use_logn_attn": True,
    "use_dynamic_ntk": True,
}
"""Fields of the config that ask for something a Llama does not compute."""
ROPES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"rope_type": "spiral"}, "rope.* 'spiral'"),
    "without-its-factor": ({"rope_type": "yarn"}, "config.json.*factor"),
    "theta-in-quotes": ({"rope_theta": "5000"}, "rope_parameters.rope_theta is '5000', and has to be a number above 0"),
    "theta-null": ({"rope_theta": None}, "rope_parameters.rope_theta is None, and has to be a number above 0"),
    "theta-of-nought": ({"rope_theta": 0.0}, "."),
    "theta-nan": ({"rope_theta": float("nan")}, "rope_parameters.rope_theta is nan"),
    "theta-of-400-digits": ({"rope_theta": 10**400}, "rope_parameters.rope_theta is 1000"),
    "factor-in-quotes": ({"rope_type": "linear", "factor": "2.0"}, "rope_parameters.factor is '2.0'"),
    "factor-below-nought": ({"rope_type": "linear", "factor": -2.0}, "factor is -2.0, and has to be a number above 0"),
    "factor-of-truth": ({"rope_type": "linear", "factor": True}, "rope_parameters.factor is True"),
    "scaled-by-default": ({"factor": 4.0}, "of the rope_type 'default', and its factor would be dropped"),
    "length-in-quotes": (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "2048"},
        "rope_parameters.original_max_position_embeddings is '2048'",
    ),
    "scale-in-quotes": (
        {"rope_type": "yarn", "factor": 2.0, "mscale": "0.7"},
        "rope_parameters.mscale is '0.7', and has to be a number",
    ),
    "type-as-list": ({"rope_type": ["linear"]}, r"rope_type is \['linear'\], and has to be the name of a type"),
    "of-a-billion": ({"partial_rotary_factor": 1e9}, "rotary_factor"),
}
CONFIG_DEFECTS: dict[str, tuple[Callable[[Model], None], str]] = {
    "missing": (lambda m: (m.path / "config.json").unlink(), "config.json: there is no such file"),
    "a-directory": (replaced_by_directory("config.json"), "config.json"),
    "empty": (written("config.json", ""), "config.json"),
    "no-json": (written("config.json", "{'a': 1}"), "config.json"),
    "binary": (written("config.json", bytes(range(128, 256))), "config.json"),
    "a-list": (written("config.json", "[]"), "config.json: (no|holds no) JSON object"),
    "nested-deeply": (written("config.json", "[" * 100_000), "config.json"),
    "no-model-type": (
        lambda m: m.json("config.json", lambda c: c.pop("model_type")),
        "config.json: model_type is None",
    ),
    "model-type-of-another-kind": (config(model_type=["llama"]), "config.json: model_type"),
    "unknown-model-type": (
        config(model_type="nobody"),
        "config.json: model_type 'nobody' is not known to transformers",
    ),
    "gptq": (config(quantization_config=GPTQ), "config.json: quantization_config.quant_method 'gptq' needs"),
    "awq": (config(quantization_config={"quant_method": "awq"}), "quant_method 'awq' needs the library gptqmodel"),
    "bitsandbytes": (
        config(quantization_config={"load_in_4bit": True}),
        "quant_method 'bitsandbytes' needs the library bitsandbytes",
    ),
    "fp8-of-whole-weights": (config(quantization_config={"quant_method": "fp8"}), "none of its weights is quantised"),
    "unnamed-quantisation": (config(quantization_config={"bits": 4}), "quantization_config.quant_method is None"),
    "quantisation-as-text": (config(quantization_config="int4"), "quantization_config is 'int4', and has to be an obj"),
    "compressed-tensors-of-old": (config(compression_config={"format": "int"}), "compression_config"),
    "gptq-of-old": (written("quantize_config.json", "{}"), "quantize_config.json: says that the weights are quant"),
    "modelopt": (written("hf_quant_config.json", "{}"), "hf_quant_config.json"),
    "an-adapter-beside-it": (written("adapter_config.json", "{}"), "adapter_config.json: an adapter is not supported"),
    "ten-million-layers": (config(num_hidden_layers=MANY), f"config.json: num_hidden_layers is {MANY}"),
    "a-thousand-layers": (config(num_hidden_layers=1000), "num_hidden_layers is 1000, and the weight files have 21"),
    "fifty-layers": (config(num_hidden_layers=50), r"model\.layers\.\d+\.\S+, .* missing from model.safetensors"),
    **{
        f"{name}-{value!r}": (config(**{name: value}), f"config.json.*{name}")
        for name, values in SIZES.items()
        for value in values
    },
    **{
        name: (config(**{name: value}), f"config.json: {name} is .*, which LlamaForCausalLM does not")
        for name, value in OF_OTHER_ARCHITECTURES.items()
    },
    **{f"rope-{name}": (rope(**fields), named) for name, (fields, named) in ROPES.items()},
    "another-hidden-size": (config(hidden_size=128, head_dim=16), r"is \[\d*,? ?64\], which config.json says is \["),
    "vocab-size-null": (config(vocab_size=None), "vocab_size|Vocab|NoneType"),
    "heads-that-do-not-divide": (
        config(num_attention_heads=4, num_key_value_heads=3),
        "no multiple of num_key_value_heads",
    ),
    "unknown-activation": (config(hidden_act="nothing"), "nothing"),
    "unknown-rope-of-old": (config(rope_scaling={"type": "spiral", "factor": 2.0}), "rope.* 'spiral'"),
    "rope-as-text": (config(rope_parameters="linear"), "config.json"),
    "rope-theta-of-old-in-quotes": (
        lambda m: m.json("config.json", lambda c: (c.pop("rope_parameters"), c.update(rope_theta="5e3"))[1]),
        "config.json: rope_theta is '5e3', and has to be a number",
    ),
    "rope-theta-of-a-kind-of-layer": (
        config(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": "many"}}),
        "rope_parameters.full_attention.rope_theta is 'many', and has to be a number above 0",
    ),
    "a-share-in-quotes": (
        config(partial_rotary_factor="0.5"),
        "config.json: partial_rotary_factor is '0.5', and is a share",
    ),
    "epsilon-in-quotes": (config(rms_norm_eps="1e-6"), "config.json: .*rms_norm_eps"),
    "tied-in-quotes": (config(tie_word_embeddings="false"), "config.json: .*tie_word_embeddings"),
    "padding-past-the-vocabulary": (config(pad_token_id=VOCAB_SIZE), "config.json: Padding_idx"),
    "rope-of-two-types": (
        config(
            rope_parameters=None, rope_theta=1e4, rope_scaling={"type": "dynamic", "rope_type": "linear", "factor": 2.0}
        ),
        "config.json: rope_scaling has the type 'dynamic' and the rope_type 'linear'",
    ),
    "rope-scaled-without-a-type": (
        config(rope_parameters=None, rope_theta=1e4, rope_scaling={"factor": 4.0}),
        "config.json: rope_scaling has no rope_type, and its factor would be dropped",
    ),
    "rope-told-twice": (
        config(rope_scaling={"type": "linear", "factor": 4.0}),
        "config.json: rope_scaling.type is 'linear', and rope_parameters.rope_type is 'default'; remove one",
    ),
    "theta-told-twice": (config(rope_theta=77.0), "rope_theta is 77.0, and rope_parameters.rope_theta is 10000.0"),
    "rope-by-kind-of-layer": (
        config(rope_parameters={"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
        "rope of its own for a type of layers",
    ),
    "a-part-of-a-head-that-llama-rotates-whole": (
        config(partial_rotary_factor=0.5),
        "config.json: partial_rotary_factor is 0.5, and LlamaForCausalLM rotates 16 of a head's 16",
    ),
    "nan-epsilon": (config(rms_norm_eps=NAN), "config.json: rms_norm_eps is nan"),
    "negative-epsilon": (config(rms_norm_eps=-1e9), "logits"),
    "nan-as-transformers-writes-it": (config(rms_norm_eps={"__float__": "NaN"}), "rms_norm_eps is nan"),
    "auto-dtype": (config(dtype="auto"), "config.json: dtype is 'auto', which is no dtype of torch"),
    "auto-dtype-of-old": (
        lambda m: m.json("config.json", lambda c: (c.pop("dtype"), c.update(torch_dtype="auto"))[1]),
        "torch_dtype",
    ),
    "dtype-of-another-module": (config(dtype="nn"), "dtype is 'nn'"),
    "no-causal-model": (config(model_type="vit"), "model_type 'vit' is no causal language model|vit"),
}

LINKED_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "quantize_config.json", WEIGHTS, INDEX, "model-1.safetensors"),
)


def linked_to_nothing(name: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        (model.path / name).unlink(missing_ok=True)
        (model.path / name).symlink_to("../blobs/gone")

    return change


def only_sentencepiece(model: Model) -> None:
    (model.path / "tokenizer.json").unlink()
    model.write("tokenizer.model", b"\n\x0b\n\x05<unk>\x15")


OWN_TOKENIZER = {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}
TOKENIZER_DEFECTS: dict[str, tuple[Callable[[Model], None], str]] = {
    "no-json": (written("tokenizer.json", "{"), "tokenizer"),
    "another-schema": (written("tokenizer.json", '{"model": {"type": "Nobody"}}'), "tokenizer"),
    "a-directory": (replaced_by_directory("tokenizer.json"), "tokenizer"),
    "settings-are-no-json": (written("tokenizer_config.json", "{"), "tokenizer"),
    "an-id-past-the-vocabulary": (token_past_the_vocabulary, f"token '<new>' is {VOCAB_SIZE}, and config.json"),
    "an-added-id-past-the-vocabulary": (
        written("added_tokens.json", json.dumps({"<new>": VOCAB_SIZE})),
        f"token '<new>' is {VOCAB_SIZE}, and config.json",
    ),
    "a-set-id-past-the-vocabulary": (
        lambda m: m.json(
            "tokenizer_config.json",
            lambda c: c.update(added_tokens_decoder={str(VOCAB_SIZE): {"content": "<new>", "special": True}}),
        ),
        f"token '<new>' is {VOCAB_SIZE}, and config.json",
    ),
    "another-models": (
        tokenizer_of_a_larger_model,
        "token '.*' is 64, and config.json has a vocab_size of 64",
    ),
    "code-of-its-own": (
        lambda m: m.json(
            "tokenizer_config.json", lambda c: c.update(tokenizer_class="XTokenizer", auto_map=OWN_TOKENIZER)
        ),
        "tokenizer: needs code that comes with the model, which is never run",
    ),
    "dropout": (
        lambda m: m.json("tokenizer.json", lambda c: c["model"].update(dropout=0.5)),
        "tokenizer.json: model.dropout is 0.5",
    ),
    "of-another-kind": (
        lambda m: m.json("tokenizer_config.json", lambda c: c.update(tokenizer_class="T5Tokenizer")),
        "tokenizer_config.json has a tokenizer_class that cannot take tokenizer.json",
    ),
    "without-tokenizer.json": (
        only_sentencepiece,
        "its tokenizer is tokenizer.model without tokenizer.json, which has to be added here: ",
    ),
    "generation-config-is-no-json": (written("generation_config.json", "{"), "generation_config.json"),
    "generation-config-is-a-list": (written("generation_config.json", "[]"), "generation_config.json"),
}


EXPERTS = "model.layers.0.block_sparse_moe.experts"
GATE = "model.layers.0.block_sparse_moe.gate.weight"


def without_all(part: str) -> Callable[[Model], None]:
    return lambda model: model.tensors(lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name])


EXPERT_DEFECTS: dict[str, tuple[Callable[[Model], None], str]] = {
    "another-shape": (
        weights(f"{EXPERTS}.1.w1.weight", lambda w: w[:-1]),
        rf"{WEIGHTS}: {EXPERTS}.1.w1.weight is \[95, 64\], and {EXPERTS}.0.w1.weight is \[96, 64\]",
    ),
    "the-first-of-another-shape": (
        weights(f"{EXPERTS}.0.w2.weight", lambda w: w[:, :-1]),
        rf"{EXPERTS}\.\d.w2.weight is",
    ),
    "a-scalar": (weights(f"{EXPERTS}.2.w3.weight", lambda w: w[0, 0]), rf"{WEIGHTS}: {EXPERTS}.2.w3.weight is \[\]"),
    "all-of-another-shape": (
        change_weights(**{f"{EXPERTS}.{expert}.w1.weight": lambda w: w.T for expert in range(4)}),
        rf"{WEIGHTS}: {EXPERTS}.\d.w1.weight is \[64, 96\] and {EXPERTS}.\d.w3.weight is \[96, 64\]",
    ),
    "one-kind-missing": (
        without_all(".w1."),
        rf"{WEIGHTS}: \S+gate_up_proj needs tensors \S+\.w1\.weight, and there are none",
    ),
    "one-kind-of-a-layer-missing": (
        without_all("layers.1.block_sparse_moe.experts.0.w3"),
        r"experts\.0\.w3\.weight is missing",
    ),
    "one-missing": (
        absent(f"{EXPERTS}.1.w1.weight"),
        rf"{EXPERTS}\.1\.w1\.weight is missing, which other experts have",
    ),
    "the-last-missing": (without_all(f"{EXPERTS}.3."), rf"{WEIGHTS}: \S+ is \[3, .*config.json says is \[4, "),
    "fewer-in-the-config": (config(num_local_experts=3), rf"{WEIGHTS}: \S+ is \[4, .*config.json says is \[3, "),
    "integers": (weights(f"{EXPERTS}.1.w1.weight", lambda w: w.to(torch.int8)), rf"{EXPERTS}.1.w1.weight is of I8"),
    "no-gate": (absent(GATE), "gate.weight missing from"),
    "surplus-members": (
        added(**{f"{EXPERTS}.{expert}.w4.weight": torch.ones(3) for expert in range(4)}),
        f"{WEIGHTS}: not known in MixtralForCausalLM: {EXPERTS}.0.w4.weight",
    ),
    "stacked-beside-single": (
        added(**{f"{EXPERTS}.gate_up_proj": torch.ones(4, 192, 64)}),
        rf"{WEIGHTS}: {EXPERTS}.gate_up_proj is {EXPERTS}.0.w1.weight of {WEIGHTS} again",
    ),
    "a-gate-by-its-new-name-too": (
        added(**{"model.layers.0.mlp.gate.weight": torch.ones(4, 64)}),
        rf"{WEIGHTS}: model.layers.0.mlp.gate.weight is {GATE} of {WEIGHTS} again",
    ),
}


@pytest.fixture(scope="module")
def sound_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "broken"
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = MixtralConfig(
        vocab_size=VOCAB_SIZE, num_key_value_heads=2, num_local_experts=4, sliding_window=None, **sizes
    )
    random_model(config).save_pretrained(str(path))
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("sound") / "broken", "llama", tie_word_embeddings=False)


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Model:
    return Model(Path(shutil.copytree(sound, tmp_path / "broken")))


def refusal(model: Model) -> str:
    """Loads the model, which must fail within BOUND_S of processor time, and returns its one-line error."""
    begin_s = time.thread_time()
    with pytest.raises(StartupError) as raised:
        load_target(model.path, device="cpu", dtype="float32")
    assert time.thread_time() - begin_s < BOUND_S
    message = str(raised.value)
    assert "\n" not in message and message.startswith("broken") and len(message) < 1000, message
    return message


DEFECTS = {
    f"{kind}-{name}": defect
    for kind, defects in {
        "weights": WEIGHT_DEFECTS,
        "config": CONFIG_DEFECTS,
        "tokenizer": TOKENIZER_DEFECTS,
        "experts": EXPERT_DEFECTS,
    }.items()
    for name, defect in defects.items()
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_named(defect: str, model: Model, sound_experts: Path) -> None:
    break_it, named = DEFECTS[defect]
    if defect.startswith("experts"):
        shutil.rmtree(model.path)
        shutil.copytree(sound_experts, model.path)
    break_it(model)
    message = refusal(model)
    assert re.search(named, message), message


@pytest.mark.parametrize(
    "save",
    [
        save_eagle1_head,
        save_eagle3_head,
        partial(save_eagle3_head, style="speculators"),
        partial(save_mtp_head, layout="nextn"),
    ],
    ids=["EAGLE-1", "EAGLE-3", "speculators", "MTP"],
)
def test_a_draft_head_is_told_from_a_model(save: Callable[..., Path], sound: Path, tmp_path: Path) -> None:
    message = refusal(Model(save(tmp_path / "broken", target_dir=sound)))
    assert message.endswith(": is a draft head, for --draft, and no model")


@pytest.mark.parametrize("name", LINKED_FILES)
def test_a_link_to_nothing_is_not_taken_for_an_absent_file(name: str, model: Model) -> None:
    linked_to_nothing(name)(model)
    assert refusal(model) == f"broken/{name}: a link to ../blobs/gone, which is not there; fetch it again"


def test_what_a_narrower_dtype_cannot_hold_is_refused(model: Model) -> None:
    weights(DOWN, lambda weight: weight * 1e6)(model)
    load_target(model.path, device="cpu", dtype="bfloat16")
    with pytest.raises(UnsupportedModel, match=f"{DOWN} has NaN or infinite numbers in torch.float16"):
        load_target(model.path, device="cpu", dtype="float16")


SOUND: dict[str, Callable[[Model], object]] = {
    "sharded": lambda model: model.shard(),
    "a-tied-output-that-is-there": lambda model: (
        model.config(tie_word_embeddings=True),
        model.tensors(lambda tensors: tensors.update({HEAD: tensors[EMBEDDINGS].clone()})),
    ),
    "old-rotation-buffers": added(**{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    "a-pickle-beside-it": written("pytorch_model.bin", b"never read"),
    "other-tensors-beside-it": lambda model: save_file({"x": torch.ones(1)}, model.path / "consolidated.safetensors"),
    "an-index-of-one-file": lambda model: model.write(
        INDEX, json.dumps({"weight_map": dict.fromkeys(load_file(model.path / WEIGHTS), WEIGHTS)})
    ),
    "a-link-to-nothing-that-is-not-read": linked_to_nothing("README.md"),
    "no-quantisation": config(quantization_config=None),
    "its-own-code-that-is-not-needed": config(auto_map={"AutoModelForCausalLM": "modeling_x.X", "AutoConfig": "c.C"}),
    "an-infinite-bound": config(time_step_limit=[0.0, INF]),
    "no-architectures": config(architectures=None),
    "fields-of-other-architectures-that-ask-for-nothing": config(
        rope_interleaved=False, logits_scaling=1.0, final_logit_softcapping=None, no_rope_layers=[1, 1]
    ),
    "theta-told-twice-alike": config(rope_theta=10000.0, rope_scaling={"type": "default", "factor": 1.0}),
    "answers-as-tuples": config(return_dict=False),
    "wider-weights": lambda model: model.tensors(
        lambda tensors: tensors.update({name: tensor.double() for name, tensor in tensors.items()})
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("change", SOUND)
def test_what_real_checkpoints_have_is_served_with_the_same_logits(change: str, model: Model, sound: Path) -> None:
    prompt = [9, 40, 41, 200, 77]
    if change == "a-tied-output-that-is-there":
        sound = model.path
    before = PagedModel(load_target(sound, device="cpu", dtype="float32"), num_rows=1)
    expected = None if sound == model.path else before.extend({1: prompt})
    SOUND[change](model)
    logits = PagedModel(load_target(model.path, device="cpu", dtype="float32"), num_rows=1).extend({1: prompt})
    if expected is not None:
        torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
def test_masks_of_old_checkpoints_are_no_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    """Transformers once saved two buffers of each GPT-2 layer, and today knows only one of them. The loader ignores
    both.
    """
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    random_model(config).save_pretrained(str(tmp_path))
    model, mask = Model(tmp_path), torch.ones(1, 1, 32, 32).tril().to(dtype)
    for layer in range(2):
        buffers = {"bias": mask.clone(), "masked_bias": torch.tensor(-1e4)}
        added(**{f"transformer.h.{layer}.attn.{name}": tensor for name, tensor in buffers.items()})(model)
    load_target(tmp_path, device="cpu", dtype="float32")
    added(**{"transformer.h.0.attn.masked_bias": mask[0, 0, 0].clone()})(model)
    with pytest.raises(UnsupportedModel, match=r"not known in GPT2LMHeadModel: transformer\.h\.0\.attn\.masked_bias"):
        load_target(tmp_path, device="cpu", dtype="float32")
