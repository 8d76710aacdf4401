"""Builds the tokenizer that a GGUF file's metadata describes, and finds its special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from common.gguf.config import Metadata, RefusedFile

_PREFIX = "tokenizer.ggml"
_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "▁"
_END_NAMES = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>", "<|call|>"),
        *("<EOT>", "<|end_of_text|>", "<|endoftext|>"),
    }
)
"""Names of special tokens that end a turn, a call or a text in all models that have them, except `<|end|>`.

Files seldom have the id of each of them, and llama.cpp finds them by name too.
"""
_MESSAGE_END, _ENDS_BESIDE_MESSAGES = "<|end|>", frozenset({"<|return|>", "<|call|>"})
"""The first name ends a turn of Phi-3, but only a message of gpt-oss, whose vocabulary has the others: after a message
of reasoning the model goes on.
"""

_ENDS = ("eos", "eot", "eom")
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_OTHERS = (
    *("seperator", "mask", "cls", "prefix", "suffix", "middle"),
    *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
)
_SPLITS_AS_GPT2 = frozenset({"default", "gpt-2", "mpt", "olmo", "jais", "phi-2", "gigachat"})
_SPLITS_DIGITS_THEN_AS_GPT2 = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
_LLAMA3 = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"})
_STARTS_WITH_BOS = _LLAMA3 | {"tekken"}
"""Pre-tokenizers whose prompts begin with BOS, unless the file says otherwise.

They also take a word that is itself a token as it is, without merging.
"""

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(num_digits: str) -> str:
    return rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{num_digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _words_by_case(num_digits: str, endings: str) -> str:
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{_CAPITALS}*{_SMALL}+{endings}|{before}{_CAPITALS}+{_SMALL}*{endings}"
        rf"|\p{{N}}{num_digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_SPLITS: dict[str, str] = {
    **dict.fromkeys((*_LLAMA3, "dbrx", "smaug-bpe"), _words("{1,3}")),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), _words("")),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _words_by_case("{1,3}", f"{_ENDINGS}?")),
    "tekken": _words_by_case("", ""),
}
"""The regular expression by which each pre-tokenizer splits a text into words. Merges do not cross words."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids of special tokens by their role. `ends` are all tokens that end an output."""

    bos: int | None
    padding: int | None
    ends: tuple[int, ...]


def special_tokens(keys: Metadata) -> SpecialTokens:
    """Returns the special tokens of the file. Raises RefusedFile if an id is outside the vocabulary."""
    tokens = keys.items(f"{_PREFIX}.tokens", str)
    num_tokens = len(tokens)
    ids = {role: _token_id(keys, role, num_tokens) for role in (*_ROLES, *_ENDS, *_OTHERS)}
    named = _ends_by_name(tokens, keys.items(f"{_PREFIX}.token_type", int, []))
    ends = [*(ids[role] for role in _ENDS), *_more_ends(keys, num_tokens), *named]
    return SpecialTokens(
        bos=ids["bos"],
        padding=ids["padding"],
        ends=tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None)),
    )


def _more_ends(keys: Metadata, num_tokens: int) -> list[int]:
    """Returns the ids of further tokens that end an output. Files from Ollama list them; others have none.

    Raises RefusedFile if an id is outside the vocabulary of `num_tokens` tokens.
    """
    key = f"{_PREFIX}.eos_token_ids"
    ends = keys.items(key, int, [])
    if not all(0 <= token_id < num_tokens for token_id in ends):
        raise keys.refuse(key, f"is past the vocabulary of {num_tokens}")
    return ends


def _ends_by_name(tokens: list[str], types: list[int]) -> list[int]:
    """Returns the ids of the control and user-defined tokens whose names show that they end an output.

    `types` has the type of each token. Ordinary text may be a token with such a name too. If `types` is empty, all
    tokens count as control tokens.
    """
    typed = enumerate(zip(tokens, types or [_CONTROL] * len(tokens), strict=False))
    ids = {token: token_id for token_id, (token, kind) in typed if kind in (_CONTROL, _USER_DEFINED)}
    names = _END_NAMES if ids.keys().isdisjoint(_ENDS_BESIDE_MESSAGES) else _END_NAMES - {_MESSAGE_END}
    return [token_id for token, token_id in ids.items() if token in names]


def _token_id(keys: Metadata, role: str, num_tokens: int) -> int | None:
    key = f"{_PREFIX}.{role}_token_id"
    token_id: int | None = keys.take(key, int, None)
    if token_id is not None and not 0 <= token_id < num_tokens:
        raise keys.refuse(key, f"is past the vocabulary of {num_tokens}")
    return token_id


def build_tokenizer(keys: Metadata, num_embeddings: int) -> Any:
    """Returns a transformers tokenizer that gives each token the file's id.

    Raises RefusedFile if the tokenizer cannot be built exactly, or has more tokens than the model's `num_embeddings`.
    """
    tokens = keys.items(f"{_PREFIX}.tokens", str)
    if len(set(tokens)) != len(tokens):
        raise RefusedFile(f"{_PREFIX}.tokens: a token is there twice")
    if len(tokens) > num_embeddings:
        raise RefusedFile(f"{_PREFIX}.tokens: {len(tokens)} tokens, where there are {num_embeddings} embeddings")
    types = keys.items(f"{_PREFIX}.token_type", int, [])
    if types and len(types) != len(tokens):
        raise RefusedFile(f"{_PREFIX}.token_type: {len(types)} types of {len(tokens)} tokens")
    for key in (f"{_PREFIX}.add_eos_token", f"{_PREFIX}.add_sep_token", f"{_PREFIX}.remove_extra_whitespaces"):
        if keys.take(key, bool, False):
            raise keys.refuse(key, "is not supported")
    kind = keys.take(f"{_PREFIX}.model", str)
    if kind == "gpt2":
        tokenizer = _byte_level(keys, tokens, types)
    elif kind == "llama":
        tokenizer = _sentencepiece(keys, tokens, types)
    else:
        raise keys.refuse(f"{_PREFIX}.model", "is not supported; gpt2 and llama are")
    template, tool_use = (keys.take(f"tokenizer.chat_template{name}", str, None) for name in ("", ".tool_use"))
    tokenizer.chat_template = {"default": template, "tool_use": tool_use} if template and tool_use else template
    _check_ids(tokenizer, tokens)
    return tokenizer


def _byte_level(keys: Metadata, tokens: list[str], types: list[int]) -> Any:
    """Builds a byte-level BPE tokenizer. `tokens` has the text of each id, and `types`, which may be empty, its type.

    A token's text is in GPT-2's alphabet of bytes, except that of an added token, which is plain.
    """
    pre = keys.take(f"{_PREFIX}.pre", str, "default")
    keys.items(f"{_PREFIX}.scores", float, [])
    if keys.take(f"{_PREFIX}.add_space_prefix", bool, False):
        raise keys.refuse(f"{_PREFIX}.add_space_prefix", "is not supported for a byte-level tokenizer")
    merges = [tuple(merge.split(" ")) for merge in keys.items(f"{_PREFIX}.merges", str)]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    unknown = next((merge for merge in merges if len(merge) != 2 or not {*merge, "".join(merge)} <= vocab.keys()), None)
    if unknown is not None:
        raise RefusedFile(f"{_PREFIX}.merges: {' '.join(unknown)!r} is not of two tokens that make a third")
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _STARTS_WITH_BOS))
    backend.pre_tokenizer = _splits(keys, pre)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    bos = _token_id(keys, "bos", len(tokens))
    if keys.take(f"{_PREFIX}.add_bos_token", bool, pre in _STARTS_WITH_BOS and bos is not None):
        backend.post_processor = _starting_with(tokens, bos)
    _find_whole(backend, tokens, types)
    return _pretrained(keys, backend, tokens)


def _find_whole(backend: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Makes `backend` find control and user-defined tokens in a text before it splits the rest."""
    typed = list(zip(tokens, types, strict=False))
    control = [AddedToken(token, special=True, normalized=False) for token, kind in typed if kind == _CONTROL]
    backend.add_special_tokens(control)
    defined = [AddedToken(token, special=False, normalized=False) for token, kind in typed if kind == _USER_DEFINED]
    backend.add_tokens(defined)


def _splits(keys: Metadata, pre: str) -> Any:
    if pre in _SPLITS_AS_GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _SPLITS_DIGITS_THEN_AS_GPT2:
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    split = _SPLITS.get(pre)
    if split is None:
        raise keys.refuse(f"{_PREFIX}.pre", "is not supported")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _starting_with(tokens: list[str], bos: int | None) -> Any:
    if bos is None:
        raise RefusedFile(f"{_PREFIX}.bos_token_id is missing, where prompts start with it")
    return processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{tokens[bos]}:0 $A:0",
                pair=f"{tokens[bos]}:0 $A:0 {tokens[bos]}:1 $B:1",
                special_tokens=[(tokens[bos], bos)],
            ),
        ]
    )


def _pretrained(keys: Metadata, backend: Any, tokens: list[str]) -> Any:
    ids = {name: _token_id(keys, role, len(tokens)) for role, name in _ROLES.items()}
    named = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)


def _sentencepiece(keys: Metadata, tokens: list[str], types: list[int]) -> Any:
    """Builds a SentencePiece BPE tokenizer. `types`, which may be empty, has the type of each token."""
    scores = keys.items(f"{_PREFIX}.scores", float)
    if len(scores) != len(tokens):
        raise RefusedFile(f"{_PREFIX}.scores: not one for each of {len(tokens)} tokens")
    keys.items(f"{_PREFIX}.merges", str, [])
    if keys.take(f"{_PREFIX}.pre", str, "default") != "default":
        raise keys.refuse(f"{_PREFIX}.pre", "is not supported for a SentencePiece tokenizer")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    model = models.BPE(vocab=vocab, merges=_merges(tokens, scores), fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if not keys.take(f"{_PREFIX}.add_space_prefix", bool, True):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="never", split=False)
    else:
        steps.append(decoders.Strip(content=" ", left=1))
        if keys.architecture == "phi3":  # a text that begins with a space gets another
            backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
        else:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(steps)
    bos = _token_id(keys, "bos", len(tokens))
    starts = keys.take(f"{_PREFIX}.add_bos_token", bool, bos is not None)
    backend.post_processor = _starting_with(tokens, bos) if starts else processors.TemplateProcessing(single="$A")
    _find_whole(backend, tokens, types)
    return _pretrained(keys, backend, tokens)


def _merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Returns all pairs of tokens that make a third, the pairs of the token with the highest score first."""
    known = set(tokens)
    return [
        (token[:end], token[end:])
        for token, _ in sorted(zip(tokens, scores, strict=True), key=lambda scored: -scored[1])
        for end in range(len(token) - 1, 0, -1)
        if token[:end] in known and token[end:] in known
    ]


def _check_ids(tokenizer: Any, tokens: list[str]) -> None:
    """Raises RefusedFile if the tokenizer has another id for a token, or tokens that the file lacks."""
    vocab = tokenizer.get_vocab()
    wrong = next((token for token_id, token in enumerate(tokens) if vocab.get(token) != token_id), None)
    wrong = wrong or next((token for token, token_id in vocab.items() if token_id >= len(tokens)), None)
    if wrong is not None:
        raise RefusedFile(f"{_PREFIX}.tokens: {wrong!r} has another id in the tokenizer that was built")
