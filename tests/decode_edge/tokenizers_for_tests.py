"""Small tokenizers for tests: every byte is a token, and some tokens hold several characters or parts of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from transformers import PreTrainedTokenizerFast

from common.grammar.matcher import Matcher, num_words
from common.text.grammars import Grammars
from common.text.tokenizer import TextTokenizer

CHAT_TEMPLATE = "".join(
    (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}",
        "{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}",
        "{% endfor %}",
        "{% if add_generation_prompt %}<assistant>{% endif %}",
    )
)
WORDS = ("ab", "bc", "abc", " a", "é", "€", "end", "stop", "\n\n")


def _byte_chars() -> dict[int, str]:
    """Returns GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in stand_ins:
            stand_ins[byte] = chr(256 + len(stand_ins) - len(printable))
    return stand_ins


def byte_level(*, chat_template: Any = CHAT_TEMPLATE) -> TextTokenizer:
    """Returns a tokenizer like those of Llama 3, Qwen and SmolLM2. Its ids 0..255 are the bytes; then come words, half
    characters and special tokens.
    """
    chars = _byte_chars()
    vocabulary = {chars[byte]: byte for byte in range(256)}
    parts = [word.encode() for word in WORDS] + ["€".encode()[:2], b"a" + "é".encode()[:1], "😀".encode()[1:]]
    parts.append("é".encode()[1:] + "é".encode()[:1])  # ends one character and begins another
    for part in parts:
        vocabulary["".join(chars[byte] for byte in part)] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrapped(tokenizer, chat_template)


def byte_fallback() -> TextTokenizer:
    """Returns a tokenizer like those of Llama 2, Mistral and Phi-3: ▁ stands for a space, and text without a piece
    becomes byte tokens.
    """
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    pieces = ["▁", "▁a", "a", "b", "c", "▁stop", "st", "op", "é", "end", "\n", "�", "▁ab", "▁x"]
    vocabulary |= {piece: 256 + index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token=None))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrapped(tokenizer)


def metaspace() -> TextTokenizer:
    """Returns a tokenizer like those of T5 and XGLM: ▁ stands for a space, and the first piece of a text loses all its
    spaces.
    """
    pieces = ["▁", "▁▁▁▁", "▁a", "a", "b", "c", "▁stop", "st", "op", "é", "end", "\n", "▁ab", "▁x"]
    tokenizer = Tokenizer(BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    return _wrapped(tokenizer)


def with_space_mark() -> TextTokenizer:
    """Returns a tokenizer like those of Llama 2 and Mistral, which puts a space before every text that it encodes."""
    pieces = ["<unk>", "▁", "\n", *'abcdefghijklmnopqrstuvwxyz{}":,0123456789<>€', "ye", "yes", "▁yes", "▁a", "ay"]
    merges = [("y", "e"), ("ye", "s"), ("▁", "yes"), ("▁", "a"), ("a", "y")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace()
    return _wrapped(tokenizer)


def word_pieces() -> TextTokenizer:
    """Returns a tokenizer like BERT's: a space comes before each word but the first, and none before a continued
    word.
    """
    pieces = ["[UNK]", "a", "b", "ab", "##c", "##a", "stop", "##st", "end", ".", ",", "é"]
    tokenizer = Tokenizer(WordPiece(vocab={piece: index for index, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return _wrapped(tokenizer)


def _wrapped(tokenizer: Tokenizer, chat_template: Any = CHAT_TEMPLATE) -> TextTokenizer:
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<pad>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    pretrained: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    pretrained.chat_template = chat_template
    return TextTokenizer(pretrained)


def vocab_size(tokenizer: TextTokenizer) -> int:
    return max(tokenizer.special_ids) + 2


def eos_id(tokenizer: TextTokenizer) -> int:
    return min(tokenizer.special_ids)


def grammars_of(tokenizer: TextTokenizer) -> Grammars:
    return Grammars(lambda: tokenizer, vocab_size=vocab_size(tokenizer), eos_token_ids=[eos_id(tokenizer)])


def allowed(matcher: Matcher, tokenizer: TextTokenizer) -> list[int]:
    """Returns the tokens that the matcher allows next."""
    mask = np.zeros(num_words(vocab_size(tokenizer)), np.int32)
    matcher.fill(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def ids_of(tokenizer: TextTokenizer, *texts: str) -> Sequence[int]:
    """Returns the ids of tokens with these texts, one token for each text."""
    token_ids = []
    for text in texts:
        (token_id,) = [i for i in range(vocab_size(tokenizer)) if tokenizer.decode([i]) == text]
        token_ids.append(token_id)
    return token_ids


def ids_of_pieces(tokenizer: TextTokenizer, pieces: Sequence[str]) -> list[int]:
    """Returns the ids of pieces, which are given as they are spelled in the vocabulary."""
    pretrained: Any = tokenizer._pretrained
    return [pretrained.convert_tokens_to_ids(piece) for piece in pieces]
