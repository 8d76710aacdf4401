"""Tests of the properties that a loaded model reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, processors

from common.errors import UnsupportedModel
from common.kv.layer_group import LayerGroupSpec
from common.model.model_files import read_tokenizer
from common.model.target import TargetModel
from common.text.tokenizer import TextTokenizer
from tests.model.conftest import Reference
from tests.model.paged_model import PagedModel
from tests.support.loading import load_target
from tests.support.models import (
    END,
    END_ID,
    START,
    UNKNOWN,
    VOCAB_SIZE,
    make_tokenizer,
    save_last_token_model,
    save_tiny_model,
)

ABSENT: Any = object()


def test_the_layer_group_is_the_shape_of_the_models_kv(tiny_target: Callable[[str], TargetModel]) -> None:
    model = tiny_target("qwen3")
    assert model.layer_group == LayerGroupSpec(
        name="target", num_layers=2, num_planes=2, num_heads=2, head_dim=32, dtype="float32"
    )
    assert (model.vocab_size, model.max_context_tokens, model.eos_token_ids) == (VOCAB_SIZE, 4096, (END_ID,))


def test_layers_with_a_window_have_a_group_with_a_shape_of_their_own(
    tiny_target: Callable[[str], TargetModel],
) -> None:
    full = LayerGroupSpec(name="target", num_layers=1, num_planes=2, num_heads=1, head_dim=32, dtype="float32")
    of_window = replace(full, name="target_24", num_heads=2, head_dim=16, window=24)
    assert tiny_target("gemma4_text").layer_groups == (full, of_window)


def test_a_window_of_the_whole_context_keeps_its_group_only_if_its_layers_have_another_shape(tmp_path: Path) -> None:
    for family, windows in (("gemma4_text", [None, 24]), ("gemma3_text", [None])):
        directory = save_tiny_model(tmp_path / family, family, max_position_embeddings=24)
        target = load_target(directory, device="cpu", dtype="float32")
        assert [group.window for group in target.layer_groups] == windows


@pytest.mark.parametrize("head_dim", [3_000_000, 0])
def test_a_size_of_a_single_layer_that_cannot_be_is_refused(head_dim: int, tmp_path: Path) -> None:
    file = save_tiny_model(tmp_path, "gemma4_text") / "config.json"
    config = json.loads(file.read_text())
    config["per_layer_config"]["1"]["head_dim"] = head_dim
    file.write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=rf"config\.json: head_dim is .*{head_dim}"):
        load_target(tmp_path, device="cpu", dtype="float32")


def with_end_tokens(
    directory: Path, *, config: Any = ABSENT, generation: Any = ABSENT, tokenizer: Any = ABSENT
) -> Path:
    """Saves a tiny model, and returns its directory. Each of its three files names the given end tokens. A field that
    is ABSENT is left out.
    """
    save_tiny_model(directory, "llama")
    for name, field, value in (
        ("config.json", "eos_token_id", config),
        ("generation_config.json", "eos_token_id", generation),
        ("tokenizer_config.json", "eos_token", tokenizer),
    ):
        content = json.loads((directory / name).read_text())
        del content[field]
        (directory / name).write_text(json.dumps(content if value is ABSENT else {**content, field: value}))
    if generation is ABSENT:
        (directory / "generation_config.json").unlink()
    return directory


@pytest.mark.parametrize(
    ("named", "ends"),
    [
        ({"config": 0, "tokenizer": END}, (0, END_ID)),
        ({"config": [0, 9], "tokenizer": END}, (0, 9, END_ID)),
        ({"config": END_ID, "generation": [7, END_ID]}, (7, END_ID)),
        ({"config": 0, "generation": [7], "tokenizer": END}, (7, 0, END_ID)),
        ({"config": 0, "generation": None, "tokenizer": {"content": END, "__type": "AddedToken"}}, (0, END_ID)),
        ({"config": None, "generation": 7}, (7,)),
        ({"tokenizer": UNKNOWN}, (3,)),
        ({"config": []}, ()),
        ({}, ()),
    ],
)
def test_output_ends_with_every_token_that_any_file_names(
    tmp_path: Path, named: dict[str, Any], ends: tuple[int, ...]
) -> None:
    assert load_target(with_end_tokens(tmp_path, **named), device="cpu", dtype="float32").eos_token_ids == ends


@pytest.mark.parametrize("value", [VOCAB_SIZE, -1, True, "2", 2.0, [END_ID, [3]], [END_ID, None], {"id": 2}])
@pytest.mark.parametrize(("file", "source"), [("config", "config.json"), ("generation", "generation_config.json")])
def test_an_end_token_that_is_none_is_refused_by_file_and_field(
    tmp_path: Path, value: Any, file: str, source: str
) -> None:
    with pytest.raises(UnsupportedModel, match=f"{source}: eos_token_id") as refused:
        load_target(with_end_tokens(tmp_path, **{file: value}), device="cpu", dtype="float32")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"tokenizer": "<|nowhere|>"}, f"tokenizer's eos_token {VOCAB_SIZE} is past"),
        ({"config": list(range(65))}, "config.json: eos_token_id: 65 end tokens, more than 64"),
    ],
)
def test_end_tokens_that_no_request_can_carry_are_refused(
    tmp_path: Path, changes: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(UnsupportedModel, match=refusal):
        load_target(with_end_tokens(tmp_path, **changes), device="cpu", dtype="float32")


@pytest.mark.parametrize("tokenizer_class", [None, "GPT2Tokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma", "gpt_neox", "mistral"])
def test_text_has_the_ids_of_tokenizer_json_whatever_its_class(
    model_type: str, tokenizer_class: str | None, tmp_path: Path
) -> None:
    made = make_tokenizer(merges=[("Ċ", "Ċ"), ("1", "2"), ("Ġ", "a"), ("Ċ", "b")])
    words = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[\r\n]+| ?[^\s\p{N}]+|\s"), "isolated")
    made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(f"{START} $A", None, [(START, 1)])
    made.save_pretrained(str(tmp_path))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["tokenizer_class"]
    settings |= {"add_bos_token": False, "split_special_tokens": True} | (
        {"tokenizer_class": tokenizer_class} if tokenizer_class else {}
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tokenizer, file = TextTokenizer.from_directory(tmp_path), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("a\n\nb", "12345 a\n\n b", f"é{END} a", "I'll", "e\u0301", ""):
        ids = file.encode(text).ids
        assert tokenizer.encode(text) == tuple(ids), text
        assert tokenizer.decode(ids) == file.decode(ids), text


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>"])
def test_a_class_s_own_end_token_counts_if_the_files_hold_it(end: str, tmp_path: Path) -> None:
    made = make_tokenizer()
    made.add_tokens([AddedToken(end, special=True)])
    made.save_pretrained(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer is not None and len(tokenizer) == len(made)
    assert tokenizer.eos_token == (end if end == "<|endoftext|>" else None)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrower_dtype_gives_about_the_same_logits(
    dtype: str, tiny_model_dir: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    model = load_target(tiny_model_dir("llama"), device="cpu", dtype=dtype)
    assert (model.layer_group.dtype, model.dtype) == (dtype, getattr(torch, dtype))
    prompt = [9, 40, 41, 200, 77, 5]
    paged = PagedModel(model, num_rows=1)
    paged.extend({1: prompt[:-1]})
    logits = paged.decode({1: prompt[-1]})
    assert logits.dtype == torch.float32
    expected = reference("llama").logits(prompt)[-1]
    assert torch.corrcoef(torch.stack([logits[0], expected]))[0, 1] > 0.99


def test_the_logits_of_a_last_token_model_depend_on_nothing_else(tmp_path: Path) -> None:
    model = load_target(save_last_token_model(tmp_path), device="cpu", dtype="float32")
    paged = PagedModel(model, num_rows=2)
    logits = paged.extend({1: [5, 6, 7, 11], 2: [11]})
    torch.testing.assert_close(logits[0], logits[1])
    assert logits[0].std() > 0.5


def test_every_layer_of_a_forward_is_counted_as_it_begins(tiny_target: Callable[[str], TargetModel]) -> None:
    model = tiny_target("llama")
    paged = PagedModel(model, num_rows=1)
    before = model.num_layers_begun
    paged.extend({1: [9, 40, 41]})
    assert model.num_layers_begun - before == model.num_layers
    paged.decode({1: 5})
    assert model.num_layers_begun - before == 2 * model.num_layers
