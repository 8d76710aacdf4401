"""What the setting `model` may name."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import gguf
import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from baton.free_ports import free_ports
from common.errors import StartupError
from common.model.loader import load_target
from common.model_source import check_model, resolve_model
from tests.model.conftest import Reference
from tests.model.paged_model import PagedModel
from tests.support.models import END_ID, START_ID


def write_gguf(directory: Path, path: Path) -> None:
    """The tiny Llama in `directory` as a float32 GGUF file."""
    config = json.loads((directory / "config.json").read_text())
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["hidden_size"] // heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {token["content"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token, _ in vocab]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(START_ID)
    writer.add_eos_token_id(END_ID)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # GGUF keeps the halves of a rotary pair side by side
            num = heads if "q_proj" in name else kv_heads
            tensor = tensor.view(num, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        assert gguf_name is not None, name
        writer.add_tensor(gguf_name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted_once_and_computes_the_same(
    tmp_path: Path, tiny_model_dir: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(tiny_model_dir("llama"), file)
    stages: list[str] = []

    def resolve() -> Path:
        return resolve_model(
            str(file), lambda stage, *_: stages.append(stage), dtype="float32", cache_dir=tmp_path / "cache"
        )

    directory = resolve()
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    prompt = AutoTokenizer.from_pretrained(str(directory))("and the other").input_ids
    assert prompt == AutoTokenizer.from_pretrained(str(tiny_model_dir("llama")))("and the other").input_ids
    logits = PagedModel(load_target(directory, device="cpu", dtype="float32"), num_rows=1).extend({1: prompt})
    torch.testing.assert_close(logits[0], reference("llama").logits(prompt)[-1], atol=1e-4, rtol=1e-4)

    num_stages = len(stages)
    assert resolve() == directory
    assert len(stages) == num_stages > 0
    file.touch()
    assert resolve() != directory


def test_a_file_that_is_no_model_is_an_error_that_names_it(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"no model")
    with pytest.raises(StartupError, match=r"broken\.gguf could not be converted"):
        resolve_model(str(file), dtype="float32", cache_dir=tmp_path / "cache")


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), dtype="float32") == tmp_path


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("no/such/file.gguf", "there is no such file"),
        ("/no/such/directory", "there is no such file or directory"),
        ("./llama", "there is no such file or directory"),
        ("~nobody/llama", "there is no such file or directory"),
        ("", "there is no such file or directory"),
        ("a\0b", "embedded null byte"),
        ("a" * 300, "File name too long"),
        ("model.safetensors", "is not a directory or a GGUF file"),
        ("model.safetensors/", "is not a directory or a GGUF file"),
    ],
)
def test_what_cannot_be_a_model_is_refused_at_once_and_named(
    spec: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.safetensors").touch()
    for look in (check_model, partial(resolve_model, dtype="float32")):
        with pytest.raises(StartupError, match=f"^model: {re.escape(spec)}: {re.escape(why)}$"):
            look(spec)


@pytest.mark.parametrize("spec", ["demo", "owner/name", "gpt2", "."])
def test_what_may_be_a_model_is_not_refused_before_it_was_looked_for(spec: str) -> None:
    check_model(spec)


class _Hub(BaseHTTPRequestHandler):
    answers: ClassVar = {
        "private": (401, "RepoNotFound"),
        "absent": (404, "RepoNotFound"),
        "gated": (403, "GatedRepo"),
        "broken": (500, ""),
    }

    def do_GET(self) -> None:
        status, code = self.answers[self.path.split("/")[4]]
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with HTTPServer(("127.0.0.1", 0), _Hub) as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("absent", "is not a directory or a GGUF file here, and the hub has no such model, or a private one"),
        ("private", "is not a directory or a GGUF file here, and the hub has no such model, or a private one"),
        ("gated", "the hub wants to be asked for access to it, and HF_TOKEN to be set"),
        ("broken", "could not be fetched from the hub|the hub cannot be reached to fetch it: Server error"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_what_the_hub_has_not_is_told_from_what_it_does_not_give(name: str, why: str) -> None:
    with pytest.raises(StartupError, match=f"^model: owner/{name}: .*({why})") as refused:
        resolve_model(f"owner/{name}", dtype="float32")
    assert "\n" not in str(refused.value)


def test_a_hub_that_cannot_be_reached_is_told_from_a_model_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")
    unreachable = "^model: owner/absent: .* the hub cannot be reached to fetch it: "
    with pytest.raises(StartupError, match=unreachable + ".*refused"):
        resolve_model("owner/absent", dtype="float32")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StartupError, match=unreachable + "HF_HUB_OFFLINE is set$"):
        resolve_model("owner/absent", dtype="float32")
