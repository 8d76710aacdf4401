"""Reads the files of a model directory, checks them against each other, and loads the model.

`read_config` checks config.json. `read_model_files` checks the headers of the weight files. `load_causal_lm` first
loads shapes only, so that a missing, superfluous or wrongly sized tensor is named before any memory is allocated; then
it loads the weights. Any exception of the libraries that do the work becomes an UnsupportedModel with one line of text.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, TokenizersBackend
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import logging as transformers_logging

from common.attention.fp8_kv import KvScale
from common.errors import BatonError, StartupError, UnsupportedModel
from common.model.quantization import QUANTIZATION, Quantization, read_quantization
from common.model.stored_tensor import STORED_DTYPES, WEIGHT_DTYPES, StoredTensor, read_header
from common.peer_text import peer_text

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WEIGHT_FILE = re.compile(r"[^/\x00-\x1f\x7f]{1,200}\.safetensors")
_OLD_QUANTIZATION = "compression_config"
_QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_ADAPTER = "adapter_config.json"
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
ROTATED_SHARES = ("partial_rotary_factor", "rotary_pct", "rotary_percent")
_ROPES = ("rope_scaling", "rope_parameters")
_ROPE_NAMES = ("type", "rope_type")
_ROPE_NUMBERS = (
    *("rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor"),
)
_ROPE_SCALES = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "short_factor",
    "long_factor",
    "beta_fast",
    "beta_slow",
)
_COMPUTES = (
    *("attention_multiplier", "embedding_multiplier", "key_multiplier", "lm_head_multiplier", "residual_multiplier"),
    *("final_logit_softcapping", "logit_scale", "logits_scaling", "logits_soft_cap", "query_pre_attn_scalar"),
    *("scale_depth", "scale_emb", "scale_embedding", "clip_qkv", "qk_layernorm", "use_qk_norm", "no_rope_layers"),
    *("attn_temperature_tuning", "parallel_attn", "rope_interleaved", "use_bidirectional_attention"),
    *("use_parallel_residual", "parallel_residual", "normalize_embedding", "qk_norm", "no_rope_layer_interval"),
    *("rope_interleave", "use_dynamic_ntk", "use_logn_attn", "attention_window", "window_size"),
)
"""Config fields that change what some architectures compute. The code of other architectures would silently ignore
them.
"""
_COUNT = re.compile(r"(num|n)_\w*(layer|expert)")
_MAX_COUNT = 1 << 16
_MAX_SIZE = 1 << 32
_MAX_NUMBER = 1e300
_MANY_LAYERS, _LARGE = 64, 1 << 16
"""Sizes up to which a model is quick to build, even if the weight files have fewer or smaller tensors."""
_OTHER_DTYPES = ("BOOL", "U8", "I8", "I16", "I32", "I64")
_TOKENIZER, _TOKENIZER_SETTINGS, _ADDED_TOKENS = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
_VOCABULARIES = (
    *(_TOKENIZER, "tokenizer.model", "tekken.json", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "vocab.txt"),
)
TOKENIZER_FILES = (*_VOCABULARIES, "merges.txt", _ADDED_TOKENS, "special_tokens_map.json")
"""The tokenizer's files, which the fingerprint covers, except for its settings."""
_TOKENIZER_ARGUMENTS: Mapping[str, Any] = {"trust_remote_code": False, "split_special_tokens": False}
_READ = re.compile(r"model.*\.safetensors|[^.].*\.(json|model|txt|jinja)")
_OF_DRAFT_HEADS = re.compile(r"fc\.weight|.*\.eh_proj\.weight")
"""Matches names of tensors that only draft heads have. A model's checkpoint may have those of MTP too."""
_FINAL_NORM = "model.norm.weight"
_IS_DRAFT_HEAD = "is a draft head, for --draft, and no model"
_OWN_CODE = "needs code that comes with the model, which is never run"
_NUM_NAMED = 3


@contextmanager
def model_faults(place: str) -> Iterator[None]:
    """Turns any exception of a library inside this context, in which files are read, into an UnsupportedModel.

    Its message is `place`, which names the files, and one line; its cause is the original error. A lack of memory
    becomes a StartupError.
    """
    try:
        yield
    except BatonError:
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise StartupError(f"{place}: not enough memory: {one_line(error)}") from error
    except Exception as error:
        says = _OWN_CODE if "trust_remote_code" in str(error) else one_line(error)
        raise UnsupportedModel(f"{place}: {says}") from error


def one_line(error: BaseException) -> str:
    """Returns the error's text on one line, with the error's type if the text is a single word."""
    said = " ".join(str(error).split())
    return peer_text(said if " " in said else f"{type(error).__name__}: {said}".removesuffix(": "))


# --------------------------------------------------------------------------------------------------- config.json


def read_config(directory: Path) -> Any:
    """Reads the config in `directory` as an object of transformers.

    Raises UnsupportedModel, which names the file, and the field if one is at fault.
    """
    place = f"{directory.name}/{CONFIG}"
    raw = read_object(directory / CONFIG)
    _refuse_changed_weights(directory, raw)
    _refuse_numbers(raw, place)
    _check_type(raw, place)
    _refuse_counts(raw, place)
    _refuse_ropes(raw, place)
    _check_sizes(raw.get, place)  # before transformers computes with them
    with model_faults(place):
        config: Any = AutoConfig.from_pretrained(str(directory), trust_remote_code=False)
        _check_sizes(partial(_size_of, config), place)
        _refuse_unread(raw, config, place)
    config.return_dict = True  # a forward returns named outputs by default
    return config


def refuse_broken_links(directory: Path) -> None:
    """Raises UnsupportedModel for a broken symbolic link in `directory`, which would otherwise look like an absent
    file.
    """
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if _READ.fullmatch(path.name) and path.is_symlink() and not path.exists():
            to = peer_text(os.readlink(path))
            raise UnsupportedModel(f"{directory.name}/{path.name}: a link to {to}, which is not there; fetch it again")


def read_object(path: Path) -> dict[str, Any]:
    """Reads the JSON object in the file at `path`. Raises UnsupportedModel, naming directory and file."""
    place = f"{path.parent.name}/{path.name}"
    with model_faults(place):
        if not path.is_file():
            raise UnsupportedModel(f"{place}: not a file")
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{place}: holds no JSON object")
    return value


def _refuse_changed_weights(directory: Path, raw: Mapping[str, Any]) -> None:
    _quantization(directory.name, raw.get(QUANTIZATION))
    if raw.get(_OLD_QUANTIZATION) is not None:
        raise UnsupportedModel(
            f"{directory.name}/{CONFIG}: {_OLD_QUANTIZATION}, of old versions of compressed-tensors, is not supported;"
            f" {QUANTIZATION} is"
        )
    for name in _QUANTIZATION_FILES if raw.get(QUANTIZATION) is None else ():
        if (directory / name).exists():
            raise UnsupportedModel(
                f"{directory.name}/{name}: says that the weights are quantised, and {CONFIG} has no {QUANTIZATION}"
            )
    if (directory / _ADAPTER).exists():
        raise UnsupportedModel(f"{directory.name}/{_ADAPTER}: an adapter is not supported; merge it into its model")


def kv_scales(files: ModelFiles, config: Any) -> tuple[KvScale, ...] | None:
    """Reads the scales that the checkpoint has for KV in FP8, one for each layer. Returns None if it has none."""
    name = files.directory.name
    quantization = _quantization(name, getattr(config, QUANTIZATION, None))
    if quantization is None:
        return None
    with model_faults(name):
        return quantization.kv_scales(files.tensors, num_layers=config.num_hidden_layers)


def _quantization(name: str, settings: object) -> Quantization | None:
    """Reads how the weights are quantised from `settings`, the config's quantization_config. `name` is the model's."""
    place = f"{name}/{CONFIG}: {QUANTIZATION}"
    with model_faults(place):
        return read_quantization(settings, place)


def _refuse_numbers(value: object, place: str, path: str = "", *, is_bound: bool = False) -> None:
    """Raises UnsupportedModel if `value`, or a value in it, is NaN or infinity, which JSON lacks and Python accepts.

    Infinity is allowed inside a list, where it may be a bound. `is_bound` says that `value` is an element of a list.
    The error names `place`, the config file, and `path`, where in it `value` lies, such as "rope_scaling.factor".
    """
    if isinstance(value, dict):
        if isinstance(written := value.get("__float__"), str):  # transformers writes them so
            value = float(written) if written in ("NaN", "Infinity", "-Infinity") else written
        else:
            for key, each in value.items():
                _refuse_numbers(each, place, f"{path}.{key}" if path else str(key))
    if isinstance(value, list):
        for each in value:
            _refuse_numbers(each, place, path, is_bound=True)
    elif isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and not is_bound)):
        raise UnsupportedModel(f"{place}: {path} is {value}")


def _refuse_counts(value: object, place: str) -> None:
    """Raises UnsupportedModel for an excessive count in `value`, before a list or tensor of that length is made.

    Also raises it if the rotated share of a head's dimensions is not in (0, 1]. `place`, the config file, is for the
    error.
    """
    if isinstance(value, dict):
        for key, each in value.items():
            if _COUNT.match(key) and isinstance(each, int) and each > _MAX_COUNT:
                raise UnsupportedModel(f"{place}: {key} is {each}, and has to be at most {_MAX_COUNT}")
            if key in ROTATED_SHARES and each is not None and not (isinstance(each, int | float) and 0 < each <= 1):
                raise UnsupportedModel(f"{place}: {key} is {peer_text(repr(each))}, and is a share: above 0, at most 1")
            _refuse_counts(each, place)


def _refuse_ropes(raw: Mapping[str, Any], place: str) -> None:
    """Raises UnsupportedModel if a rope setting of the config `raw` is invalid, or transformers would ignore it.

    transformers ignores one of two different values that are given for the same setting, and a scaling factor without a
    rope type that uses it.
    """
    for key in ("rope_theta", *_ROPES):
        _refuse_rope_values(raw.get(key), place, key)
    old, new = (rope if isinstance(rope := raw.get(key), dict) else {} for key in _ROPES)
    for key, rope in zip(_ROPES, (old, new), strict=True):
        for each in (rope, *(part for part in rope.values() if isinstance(part, dict))):
            kinds = {str(each[name]): f"{name} {each[name]!r}" for name in _ROPE_NAMES if each.get(name)}
            if len(kinds) > 1:
                raise UnsupportedModel(f"{place}: {key} has the {' and the '.join(kinds.values())}; remove one")
            scale = next((name for name in _ROPE_SCALES if not _asks_for_nothing(each.get(name))), None)
            if scale is not None and kinds.keys() <= {"default"}:
                says = "has no rope_type" if not kinds else "is of the rope_type 'default'"
                raise UnsupportedModel(f"{place}: {key} {says}, and its {scale} would be dropped")
    told = [(f"{_ROPES[0]}.{key}", "rope_type" if key == "type" else key, value) for key, value in old.items() if new]
    if "rope_theta" in new:
        told.append(("rope_theta", "rope_theta", raw.get("rope_theta")))
    for name, key, value in told:
        other = new.get(key, new.get("type", "default") if key == "rope_type" else None)
        if value != other and not _asks_for_nothing(value):
            raise UnsupportedModel(f"{place}: {name} is {value!r}, and {_ROPES[1]}.{key} is {other!r}; remove one")


def _refuse_rope_values(value: object, place: str, path: str) -> None:
    """Raises UnsupportedModel if `value`, or a value in it if it is a dictionary, is no valid setting of rope.

    The error names `place`, the config file, and `path`, where in it `value` lies, such as "rope_scaling.factor".
    """
    key = path.rpartition(".")[2]
    if isinstance(value, dict):
        for name, each in value.items():
            _refuse_rope_values(each, place, f"{path}.{name}")
    elif key in _ROPE_NAMES:
        if not isinstance(value, str | None):
            raise UnsupportedModel(f"{place}: {path} is {peer_text(repr(value))}, and has to be the name of a type")
    elif key in _ROPE_NUMBERS and (value is not None or path.endswith(".rope_theta")):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < _MAX_NUMBER:  # type: ignore[operator]
            raise UnsupportedModel(f"{place}: {path} is {peer_text(repr(value))}, and has to be a number above 0")
    elif isinstance(value, str) and _is_number(value):
        raise UnsupportedModel(f"{place}: {path} is {peer_text(repr(value))}, and has to be a number")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _asks_for_nothing(value: object) -> bool:
    if isinstance(value, list):
        return all(each == 1 for each in value)
    return not value or (value == 1 and not isinstance(value, bool))


def _refuse_unread(raw: Mapping[str, Any], config: Any, place: str) -> None:
    """Raises UnsupportedModel for a config field that other architectures compute with, but this one's code ignores.

    A field counts as ignored if transformers' code for the architecture does not contain its name. `raw` is the content
    of config.json, and `config` the object that transformers makes of it.
    """
    asked = [key for key in _COMPUTES if not _asks_for_nothing(raw.get(key))]
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) if asked else None
    if model_class is None:
        return
    code = "".join(inspect.getsource(inspect.getmodule(each)) for each in (type(config), model_class))  # type: ignore[arg-type]
    for key in asked:
        if key not in code:
            raise UnsupportedModel(
                f"{place}: {key} is {peer_text(repr(raw[key]))}, which {model_class.__name__} does not compute with"
            )


def _check_type(raw: Mapping[str, Any], place: str) -> None:
    if "speculators_model_type" in raw:
        raise UnsupportedModel(f"{place}: {_IS_DRAFT_HEAD}")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise UnsupportedModel(f"{place}: model_type is {model_type!r}; it names the architecture, as llama does")
    known = model_type in transformers.CONFIG_MAPPING
    if raw.get("auto_map") and not known:
        raise UnsupportedModel(
            f"{place}: auto_map: model_type {peer_text(model_type)!r} {_OWN_CODE}; serve a type that transformers knows"
        )
    if not known:
        raise UnsupportedModel(
            f"{place}: model_type {peer_text(model_type)!r} is not known to transformers {transformers.__version__}"
        )
    for key in ("dtype", "torch_dtype"):
        dtype = raw.get(key)
        if dtype is not None and not (isinstance(dtype, str) and isinstance(_torch_dtype(dtype), torch.dtype)):
            raise UnsupportedModel(f"{place}: {key} is {dtype!r}, which is no dtype of torch; float32 is one")


def _torch_dtype(name: str) -> object:
    return getattr(torch, name.removeprefix("torch."), None)


def _size_of(config: Any, key: str, default: None = None) -> Any:
    """Returns a field of a config, or a list of each layer's value if layers differ."""
    if config.is_heterogeneous:
        return [getattr(layer, key, default) for layer in config.per_layer_config]
    return getattr(config, key, default)


def _check_sizes(get: Callable[[str, None], Any], place: str) -> None:
    for key in _SIZES:
        value = get(key, None)
        for each in value if isinstance(value, list | tuple) else (value,):
            if each is not None and (isinstance(each, bool) or not isinstance(each, int) or not 0 < each < _MAX_SIZE):
                raise UnsupportedModel(
                    f"{place}: {key} is {peer_text(repr(each))}, and has to be a whole number from 1 to {_MAX_SIZE}"
                )
    heads, kv_heads = (get(key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise UnsupportedModel(f"{place}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")


# ------------------------------------------------------------------------------------------------------- the tokenizer


def read_tokenizer(directory: Path) -> Any | None:
    """Reads the tokenizer in `directory`. Returns None if there is none; transformers would make up an empty one.

    If there is a tokenizer.json, texts are normalised, split and merged as it says. Many tokenizer classes of
    transformers take only its vocabulary and have rules of their own. Of such a class only the default special tokens
    are kept, if the files add them to the vocabulary. `split_special_tokens` of the settings is ignored.
    """
    there = [name for name in _VOCABULARIES if (directory / name).exists()]
    if not there and not (directory / _TOKENIZER_SETTINGS).exists():
        return None
    is_converted = there and _TOKENIZER not in there
    only = f" is {there[0]} without {_TOKENIZER}, which has to be added here" if is_converted else ""
    with model_faults(f"{directory.name}: its tokenizer{only}"):
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(directory), **_TOKENIZER_ARGUMENTS)
        except (AttributeError, TypeError) as error:  # of a class that makes another kind of model of the vocabulary
            if (directory / _TOKENIZER).exists():
                what = f"{_TOKENIZER_SETTINGS} has a tokenizer_class that cannot take {_TOKENIZER}"
                raise UnsupportedModel(f"{directory.name}: {what}") from error
            raise
        added = None if type(tokenizer) is TokenizersBackend else _added_tokens(directory)
        if added is not None:
            named = tokenizer.special_tokens_map.items()
            special: dict[str, Any] = {name: token for name, token in named if token in added}
            tokenizer = TokenizersBackend.from_pretrained(str(directory), **_TOKENIZER_ARGUMENTS, **special)
    model = tokenizer.backend_tokenizer.model if isinstance(tokenizer, TokenizersBackend) else None
    if dropout := getattr(model, "dropout", None):
        place = f"{directory.name}/{_TOKENIZER}"
        raise UnsupportedModel(f"{place}: model.dropout is {dropout:g}, with which a text has other ids each time")
    return tokenizer


def check_vocabulary(directory: Path, tokenizer: Any, vocab_size: int) -> None:
    """Raises UnsupportedModel, naming the token, if a token's id is not below `vocab_size`.

    Tokens that are in no vocabulary file are not checked: transformers adds special tokens that only the settings name,
    and a prompt with such a token is refused later.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    past = sorted((token_id, token) for token, token_id in vocabulary.items() if token_id >= vocab_size)
    stored = _stored_tokens(directory) if past else None
    for token_id, token in past:
        if stored is None or token in stored:
            raise UnsupportedModel(
                f"{directory.name}: the tokenizer's token {peer_text(repr(token))} is {token_id}, and {CONFIG} has a"
                f" vocab_size of {vocab_size}"
            )


def _stored_tokens(directory: Path) -> set[str] | None:
    """Returns the texts of all tokens that tokenizer.json and the files beside it name, in the vocabulary or added to
    it. Returns None if there is no tokenizer.json.
    """
    path = directory / _TOKENIZER
    if (added := _added_tokens(directory)) is None:
        return None
    with model_faults(f"{directory.name}/{path.name}"):
        vocabulary = read_object(path)["model"]["vocab"]  # by token, or pairs of token and score
        return added | (set(vocabulary) if isinstance(vocabulary, dict) else {str(token) for token, _ in vocabulary})


def _added_tokens(directory: Path) -> set[str] | None:
    """Returns the texts of the tokens that the files add to the vocabulary. Returns None without tokenizer.json."""
    path = directory / _TOKENIZER
    if not path.exists():
        return None
    with model_faults(f"{directory.name}/{path.name}"):
        words = {added["content"] for added in read_object(path).get("added_tokens", ())}
    settings, more = (directory / name for name in (_TOKENIZER_SETTINGS, _ADDED_TOKENS))
    with model_faults(f"{directory.name}: its tokenizer"):
        if settings.exists():
            words |= {added["content"] for added in read_object(settings).get("added_tokens_decoder", {}).values()}
        return words | read_object(more).keys() if more.exists() else words


# -------------------------------------------------------------------------------------------------- weight files


@dataclass(frozen=True, slots=True)
class FileVersion:
    """A file's state at one time. Writing or replacing the file changes at least one of these fields."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, file: Path) -> FileVersion:
        stat = file.stat()
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def read_versions(directory: Path) -> dict[Path, FileVersion]:
    """Returns the versions of config and tokenizer files, which decide what a model computes. Call it before reading
    them.

    Weight files are not included. Raises UnsupportedModel if there is no config.json.
    """
    place = f"{directory.name}/{CONFIG}"
    if not (directory / CONFIG).exists():
        raise UnsupportedModel(f"{place}: there is no such file; a model is a directory that has one")
    with model_faults(place):
        files = [directory / name for name in (CONFIG, GENERATION_CONFIG, _TOKENIZER_SETTINGS, *TOKENIZER_FILES)]
        return {file: FileVersion.of(file) for file in files if file.exists()}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's stored tensors by name, and the versions of all files that decide what it computes."""

    directory: Path
    tensors: Mapping[str, StoredTensor]
    versions: Mapping[Path, FileVersion]

    @property
    def weight_files(self) -> list[Path]:
        return sorted({stored.file for stored in self.tensors.values()})

    def check_unchanged(self) -> None:
        """Raises StartupError if a file has changed since it was read."""
        for file, version in self.versions.items():
            with model_faults(f"{self.directory.name}/{file.name}"):
                now = FileVersion.of(file)
            if now != version:
                raise StartupError(f"{self.directory.name}/{file.name}: changed while it was read; start again")


def read_model_files(directory: Path, versions: Mapping[Path, FileVersion]) -> ModelFiles:
    """Reads the headers of the weight files in `directory`. Raises UnsupportedModel, naming file and tensor.

    `versions` is the result of `read_versions`; the weight files are added to it.
    """
    tensors: dict[str, StoredTensor] = {}
    versions = dict(versions)
    for file, expected in _weight_files(directory).items():
        place = f"{directory.name}/{file.name}"
        with model_faults(f"{place}: cannot be read, fetch it again"):
            if not file.is_file():
                raise UnsupportedModel(f"{place}: there is no such file; fetch it again")
            versions[file] = FileVersion.of(file)
            for name, stored in read_header(file).items():
                if name in tensors:
                    raise UnsupportedModel(f"{place}: {name} is in {tensors[name].file.name} too")
                tensors[name] = stored
        for name in expected:
            if name not in tensors or tensors[name].file != file:
                raise UnsupportedModel(f"{place}: lacks {peer_text(name)}, which {_INDEX} says is there")
    if not tensors:
        raise UnsupportedModel(f"{directory.name}: its weight files hold no tensors")
    _check_experts(directory.name, tensors)
    return ModelFiles(directory, tensors, versions)


def _weight_files(directory: Path) -> dict[Path, list[str]]:
    """Returns the weight files, each with the tensors that the index lists for it; without an index the lists are
    empty.
    """
    whole, index = directory / _WEIGHTS, directory / _INDEX
    if not index.exists():
        if whole.exists():
            return {whole: []}
        others = sorted(path.name for pattern in ("*.safetensors", "*.bin", "*.pt") for path in directory.glob(pattern))
        there = f"it has {', '.join(others[:_NUM_NAMED])}" if others else "it has no weights"
        raise UnsupportedModel(f"{directory.name}: neither {_WEIGHTS} nor {_INDEX}: {there}")
    place = f"{directory.name}/{_INDEX}"
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UnsupportedModel(f"{place}: weight_map is no object that names tensors")
    files: dict[Path, list[str]] = {}
    for name, file_name in sorted(weight_map.items()):
        if not isinstance(file_name, str) or not _WEIGHT_FILE.fullmatch(file_name):
            raise UnsupportedModel(f"{place}: weight_map: {peer_text(name)} is in no *.safetensors of the directory")
        files.setdefault(directory / file_name, []).append(name)
    if whole.exists() and whole not in files:
        raise UnsupportedModel(f"{directory.name}: has {_WEIGHTS} beside {_INDEX}, which names other files; remove one")
    return files


def _check_experts(name: str, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises UnsupportedModel unless the numbered experts of each layer are complete, with tensors of equal shapes.

    `name` is the model's name, for errors.
    """
    experts: dict[str, dict[int, set[str]]] = {}
    for tensor in tensors:
        parts = tensor.split(".")
        for place, (container, number) in enumerate(itertools.pairwise(parts)):
            if container.endswith("experts") and number.isdecimal():
                of_container = experts.setdefault(".".join(parts[: place + 1]), {})
                of_container.setdefault(int(number), set()).add(".".join(parts[place + 2 :]))
    for container, numbers in experts.items():
        first = min(numbers)
        members = set().union(*numbers.values())
        for expert in range(len(numbers)):
            for member in sorted(members):
                path = f"{container}.{expert}.{member}"
                if path not in tensors:
                    raise UnsupportedModel(f"{name}: {path} is missing, which other experts have")
                stored, like = tensors[path], f"{container}.{first}.{member}"
                if stored.shape != tensors[like].shape:
                    raise UnsupportedModel(
                        f"{name}/{stored.file.name}: {path} is {list(stored.shape)}, and {like} is"
                        f" {list(tensors[like].shape)}"
                    )


# --------------------------------------------------------------------------------------------------- the weights


OnBytes = Callable[[int, int], None]
"""Called while weights are read, with the bytes read so far and their total. Any thread may call it, one at a time."""


def load_causal_lm(
    files: ModelFiles,
    config: Any,
    dtype: torch.dtype,
    *,
    attention: str,
    device: str = "cpu",
    on_progress: OnBytes = lambda num_done, num_total: None,
) -> Any:
    """Loads the causal language model of `config` on `device`, with exactly the tensors of `files`. Each tensor goes to
    the device as soon as it is read.

    Raises UnsupportedModel, naming tensor and file, if a tensor is missing, superfluous or of another shape. A model
    with quantised weights is loaded on the CPU, with the weights that they stand for (see quantization.py).
    """
    name = files.directory.name
    quantization = _quantization(name, getattr(config, QUANTIZATION, None))
    whole, whole_config = files, copy.deepcopy(config)
    if quantization is not None:
        with model_faults(name):
            whole = replace(files, tensors=quantization.dense(files.tensors))
        del whole_config.quantization_config
        config = copy.deepcopy(config)
        config.quantization_config = dict(quantization.settings)
    model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise UnsupportedModel(f"{name}/{CONFIG}: model_type {config.model_type!r} is no causal language model")
    with model_faults(f"{name}/{CONFIG}"):
        _check_counts(whole, whole_config)

    def load(config: Any, tensors: Mapping[str, Any], device: str, place: str = name) -> tuple[Any, dict[str, Any]]:
        with model_faults(place), _interface_only(attention, name), _silent_transformers():
            model, report = model_class.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=dtype,
                device_map={"": device},
                attn_implementation=attention,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        return model, report

    empty = {
        tensor: torch.empty(stored.shape, dtype=_dtype_of(name, tensor, stored), device="meta")
        for tensor, stored in whole.tensors.items()
    }
    try:
        shapes, report = load(whole_config, empty, "meta")
    except UnsupportedModel:
        model, _ = load(whole_config, {}, "meta", f"{name}/{CONFIG}")  # raises if the config is at fault, and no tensor
        _check_parts(whole, _TensorSources(model, whole))
        raise
    _check_report(whole, shapes, report)
    count = _BytesRead(sum(stored.num_bytes for stored in files.tensors.values()), on_progress)
    tensors = {tensor: _UnreadTensor(stored, count.add) for tensor, stored in files.tensors.items()}
    try:
        if quantization is None:
            model, report = load(config, tensors, device)
        else:
            model, report = load(config, quantization.loaded(tensors), "cpu")
    finally:
        files.check_unchanged()  # a file that changed is the cause of whatever else went wrong
    _check_report(whole, model, report)
    return model


class _BytesRead:
    """Counts the bytes of weights that threads have read, and reports each new count with `total`."""

    def __init__(self, total: int, on_progress: OnBytes) -> None:
        self._lock = threading.Lock()
        self._done = 0
        self._total = total
        self._on_progress = on_progress

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._on_progress(self._done, self._total)


class _UnreadTensor:
    """A stored tensor in transformers' form: indexing it as `tensor[...]` reads it."""

    def __init__(self, stored: StoredTensor, on_read: Callable[[int], None]) -> None:
        self._stored = stored
        self._on_read = on_read

    def __getitem__(self, whole: EllipsisType) -> Tensor:
        return self._stored.read(self._on_read)

    def get_dtype(self) -> str:
        return self._stored.dtype


@contextmanager
def _interface_only(attention: str, name: str) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        if error.args != (attention,):
            raise
        raise UnsupportedModel(
            f"{name}: attention outside transformers' attention interface is not supported"
        ) from error


def _dtype_of(name: str, tensor: str, stored: StoredTensor) -> torch.dtype:
    if stored.dtype not in WEIGHT_DTYPES and stored.dtype not in _OTHER_DTYPES:
        raise UnsupportedModel(
            f"{name}/{stored.file.name}: {tensor} is of {stored.dtype}, and {CONFIG} does not say how it is quantised"
        )
    return STORED_DTYPES[stored.dtype]


def _check_counts(files: ModelFiles, config: Any) -> None:
    """Raises UnsupportedModel for a size in the config that the weight files cannot support.

    A model of ten thousand layers would take minutes to build, and a rope table of a billion numbers all memory. So the
    files must have that many tensors, or tensors that large.
    """
    num_tensors = len(files.tensors)
    largest = max(max(stored.shape, default=0) for stored in files.tensors.values())
    counts = {key: value for key, value in config.to_dict().items() if _COUNT.match(key)}
    sizes = {key: _size_of(config, key) for key in _SIZES if key != "max_position_embeddings"}
    for key, value in {**sizes, **counts}.items():
        most = max(num_tensors, _MANY_LAYERS) if "layer" in key else max(num_tensors, largest, _LARGE)
        if any(isinstance(each, int) and each > most for each in (value if isinstance(value, list) else [value])):
            raise UnsupportedModel(
                f"{files.directory.name}/{CONFIG}: {key} is {value}, and the weight files have {num_tensors} tensors"
                f" of at most {largest} rows or columns"
            )


class _TensorSources:
    """Maps each of a model's tensors to the stored tensors that it is made of, all by name.

    transformers renames some stored tensors, and stacks or joins others.
    """

    def __init__(self, model: Any, files: ModelFiles) -> None:
        conversions = get_model_conversion_mapping(model)
        renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
        converters = [each for each in conversions if isinstance(each, WeightConverter)]
        state: dict[str, Tensor] = model.state_dict()
        self._siblings = {pattern: each.source_patterns for each in converters for pattern in each.source_patterns}
        self._files = files
        self.parts: dict[str, dict[str | None, list[str]]] = {}
        """Stored tensors, first by the name of the tensor that they become, then by transformers' pattern (None: stored
        unchanged).
        """
        for tensor in files.tensors:
            key, pattern = rename_source_key(tensor, renamings, converters, model.base_model_prefix, state)
            if key not in state and tensor in state:
                key, pattern = tensor, None
            self.parts.setdefault(key, {}).setdefault(pattern, []).append(tensor)

    def of(self, key: str) -> list[str]:
        """Returns the names of the stored tensors that become the model's tensor `key`, or `key` if there are none."""
        return [tensor for tensors in self.parts.get(key, {}).values() for tensor in tensors] or [key]

    def place(self, key: str) -> str:
        stored = self._files.tensors.get(self.of(key)[0])
        name = self._files.directory.name
        return name if stored is None else f"{name}/{stored.file.name}"

    def twice(self, key: str) -> tuple[str, str] | None:
        """Returns two stored tensors that both hold the model's tensor `key`, or None if it is stored only once.

        The first holds the tensor or a part of it, the second all of it.
        """
        whole = sorted(self.parts[key].get(None, ()), key=len, reverse=True)
        parts = [tensor for pattern, tensors in self.parts[key].items() if pattern is not None for tensor in tensors]
        return ((parts + whole)[0], whole[-1]) if whole and len(parts + whole) > 1 else None

    def absent_patterns(self, key: str) -> list[str]:
        """Returns the patterns of names that are missing among the stored tensors that together become `key`.

        `key` is the name of a tensor of the model.
        """
        there = self.parts[key]
        return [each for pattern in there if pattern for each in self._siblings[pattern] if each not in there]


def _check_parts(files: ModelFiles, sources: _TensorSources) -> None:
    """Raises UnsupportedModel, naming the tensors, if stored tensors cannot be combined into one."""
    for key, parts in sources.parts.items():
        if absent := sources.absent_patterns(key):
            raise UnsupportedModel(f"{sources.place(key)}: {key} needs tensors {_some(absent)}, and there are none")
        shapes = {files.tensors[tensor].shape: tensor for tensor in sources.of(key)}
        if len(parts) > 1 and len(shapes) > 1:
            said = " and ".join(f"{tensor} is {list(shape)}" for shape, tensor in list(shapes.items())[:2])
            raise UnsupportedModel(f"{sources.place(key)}: {said}, and make no {key} together")


def _check_report(files: ModelFiles, model: Any, report: Mapping[str, Any]) -> None:
    name, tensors, sources = files.directory.name, files.tensors, _TensorSources(model, files)
    missing = sorted(report["missing_keys"])
    if missing and _FINAL_NORM not in tensors and any(map(_OF_DRAFT_HEADS.fullmatch, tensors)):
        raise UnsupportedModel(f"{name}: {_IS_DRAFT_HEAD}")
    if missing:
        raise UnsupportedModel(f"{name}: {_some(missing)} missing from {_file_names(files)}")
    for key, stored, expected in sorted(report["mismatched_keys"], key=lambda entry: str(entry[0])):
        raise UnsupportedModel(
            f"{sources.place(key)}: {key} is {list(stored)}, which {CONFIG} says is {list(expected)}"
        )
    unexpected = [key for key in sorted(report["unexpected_keys"]) if not _is_old_buffer(key, tensors.get(key))]
    if unexpected:
        said = [tensor for key in unexpected for tensor in sources.of(key)]
        raise UnsupportedModel(f"{sources.place(unexpected[0])}: not known in {type(model).__name__}: {_some(said)}")
    state: dict[str, Tensor] = model.state_dict()
    for key in sources.parts.keys() & state.keys():
        if (twice := sources.twice(key)) is not None:
            first, again = twice
            raise UnsupportedModel(
                f"{name}/{tensors[again].file.name}: {again} is {first} of {tensors[first].file.name} again"
            )
    for tensor, stored in tensors.items():
        target = state.get(tensor, state.get(f"{model.base_model_prefix}.{tensor}"))
        is_computed_with = not _is_old_buffer(tensor, stored) if target is None else target.is_floating_point()
        if stored.dtype not in WEIGHT_DTYPES and is_computed_with:
            raise UnsupportedModel(
                f"{name}/{stored.file.name}: {tensor} is of {stored.dtype}, and weights are of floats"
            )


def _is_old_buffer(tensor: str, stored: StoredTensor | None) -> bool:
    """Returns whether the tensor is a buffer that earlier versions of transformers stored, and whose values follow from
    the config.

    `stored` describes the tensor named `tensor`; None if no stored tensor has this name, and then the answer is False.
    """
    if stored is None:
        return False
    is_mask = len(stored.shape) == 4 and stored.shape[:2] == (1, 1) and stored.shape[2] == stored.shape[3]
    return (
        (tensor.endswith((".attn.bias", ".attention.bias")) and is_mask)
        or (tensor.endswith(".masked_bias") and math.prod(stored.shape) == 1)
        or tensor.endswith("position_ids")
    )


def _file_names(files: ModelFiles) -> str:
    names = [file.name for file in files.weight_files]
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return peer_text(", ".join(names[:_NUM_NAMED])) + more


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Silences transformers inside this context. Its loading report is a long table; Baton's errors are one line."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


@torch.inference_mode()
def check_finite(model: Any, *, name: str) -> None:
    """Raises UnsupportedModel, naming the tensor, if a weight is NaN or infinite, or a buffer holds NaN."""
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for tensor_name, tensor in tensors:
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            low, high = (float(each) for each in torch.aminmax(tensor))
            is_bad = math.isnan(low) if kind == "buffer" else not (math.isfinite(low) and math.isfinite(high))
            if is_bad:
                where = "has" if kind == "parameter" else f"which follows from {CONFIG}, has"
                raise UnsupportedModel(f"{name}: {tensor_name} {where} NaN or infinite numbers in {tensor.dtype}")
