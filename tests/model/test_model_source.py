"""Tests of the values that the setting `model` accepts."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.checkpoints.source import check_draft, check_model, resolve_model
from common.errors import StartupError
from tests.model.conftest import Reference
from tests.model.paged_model import PagedModel
from tests.support.free_ports import free_ports
from tests.support.gguf_files import gguf_of
from tests.support.loading import load_target


@pytest.mark.thorough
def test_a_gguf_file_is_converted_once_and_computes_the_same(
    tmp_path: Path, tiny_model_dir: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    source = AutoModelForCausalLM.from_pretrained(str(tiny_model_dir("llama")), dtype=torch.float32)
    file = gguf_of(source).write(tmp_path / "tiny.gguf")
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
    with pytest.raises(StartupError, match=r"^broken\.gguf could not be converted: no GGUF file that can be read.*$"):
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


@pytest.mark.parametrize("spec", ["demo", "owner/name", "gpt2", "here", "here.gguf"])
def test_what_may_be_a_model_is_not_refused_before_it_was_looked_for(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    Path("here/config.json").touch()
    Path("here.gguf").touch()
    check_model(spec)


def test_a_directory_without_a_config_is_no_model_and_no_head(tmp_path: Path) -> None:
    for setting, look in (("model", check_model), ("draft", check_draft)):
        with pytest.raises(StartupError, match=f"^{setting}: {tmp_path}: is a directory without config.json$"):
            look(str(tmp_path))


def test_a_config_that_is_a_link_to_nothing_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("../blobs/gone")
    for setting, look in (("model", check_model), ("draft", check_draft)):
        with pytest.raises(
            StartupError, match=f"^{setting}: {tmp_path}: its config.json is a link to ../blobs/gone, which"
        ):
            look(str(tmp_path))


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


@pytest.mark.usefixtures("hub")
def test_a_home_that_is_no_directory_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    token = tmp_path / "file" / "token"
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(token))
    with pytest.raises(StartupError, match=f"could not be fetched from the hub: {token}: Not a directory$"):
        resolve_model("owner/absent", dtype="float32")


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
