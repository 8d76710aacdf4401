"""Tests that the bytes of each SmolLM2 token decode to the token's text."""

from __future__ import annotations

from pathlib import Path

from common.sampling.params import TokenLogprobs
from common.text.tokenizer import TextTokenizer
from decode_service.edge.text.output import OutputProcessor

TEXT = "Grüße, 世界! 🧑🏽‍🚀 naïve — “ok”\n\n\tdef f(x):  # ½\n Ω≈ç√ नमस्ते"


def test_those_of_an_output_joined_are_its_text(model_dir: Path) -> None:
    tokenizer = TextTokenizer.from_directory(model_dir)
    token_ids = tokenizer.encode(TEXT)
    piece = OutputProcessor(decoder=tokenizer).push(token_ids, [TokenLogprobs(-1.0, (), ())] * len(token_ids))
    tokens = [position.token for position in piece.logprobs]
    assert b"".join(tokens) == piece.text.encode() == TEXT.encode()
    assert any(b"\xef\xbf\xbd" in token.decode(errors="replace").encode() for token in tokens), "no character was cut"


def test_each_token_s_decode_to_what_it_decodes_to(model_dir: Path) -> None:
    tokenizer = TextTokenizer.from_directory(model_dir)
    num_compared = 0
    for token_id in range(49152):
        if not tokenizer.is_skipped(token_id):
            assert tokenizer.bytes_of(token_id).decode(errors="replace") == tokenizer.decode([token_id])
            num_compared += 1
    assert num_compared > 49000
