"""Tests of what a service's process does before it serves."""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common.config.settings import DecodeSettings, PrefillSettings, ServiceSettings
from common.errors import StartupError
from common.service.process import Process, Serve, run_service
from common.service.program import EXIT_STARTUP
from tests.support.draft_heads import save_eagle3_head
from tests.support.models import save_tiny_model


def test_what_is_imported_is_never_searched_for_garbage_and_what_comes_after_it_is() -> None:
    is_searched: list[bool] = []
    num_left_out = gc.get_freeze_count()

    def import_serve() -> Serve[DecodeSettings]:
        is_searched.append(gc.isenabled())
        raise StartupError("far enough")

    assert run_service("decode_service", DecodeSettings, import_serve, []) == EXIT_STARTUP
    try:
        assert is_searched == [False]
        assert gc.isenabled() and gc.get_freeze_count() > num_left_out
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("program", ["prefill_service", "decode_service", "gateway"])
def test_grpc_and_torch_are_imported_after_the_settings_are_read(program: str) -> None:
    """So `--help` and mistakes are answered at once, and gRPC writes no log lines of its own."""
    found = f"import sys, {program}.__main__; print({{'grpc', 'torch'}} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", found], text=True) == "set()\n"


OWN_CODE = """
import pathlib
pathlib.Path(__file__).with_name("was-run").touch()
"""


def with_own_model(directory: Path) -> str:
    """Changes the model's directory to a model that transformers does not know and that brings its own code. Returns
    the expected error.
    """
    config = json.loads((directory / "config.json").read_text())
    classes = {"AutoConfig": "code.XConfig", "AutoModelForCausalLM": "code.XForCausalLM"}
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "x", "auto_map": classes}))
    return "config.json: auto_map: model_type 'x' needs code that comes with the model, which is never run"


def with_own_tokenizer(directory: Path) -> str:
    config = json.loads((directory / "tokenizer_config.json").read_text())
    classes = {"AutoTokenizer": ["code.XTokenizer", None]}
    changed = {**config, "tokenizer_class": "XTokenizer", "auto_map": classes}
    (directory / "tokenizer_config.json").write_text(json.dumps(changed))
    return "its tokenizer: needs code that comes with the model, which is never run"


@pytest.mark.parametrize("change", [with_own_model, with_own_tokenizer])
@pytest.mark.parametrize(
    ("program", "kind"), [("prefill_service", PrefillSettings), ("decode_service", DecodeSettings)]
)
def test_a_models_own_code_is_neither_run_nor_asked_about(
    program: str,
    kind: type[ServiceSettings],
    change: Callable[[Path], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    directory = save_tiny_model(tmp_path / "model", "llama")
    (directory / "code.py").write_text(OWN_CODE)
    refusal = change(directory)
    answers = io.StringIO("y\n" * 9)
    capfd.readouterr()
    monkeypatch.setattr(sys, "stdin", answers)
    try:
        assert run_service(program, kind, lambda: _never_served, [f"--model={directory}"]) == EXIT_STARTUP
    finally:
        gc.unfreeze()
    *_, last = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert last["event"] == "cannot_start" and refusal in last["error"]
    assert answers.tell() == 0, "it was asked"
    assert not (directory / "was-run").exists()


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ("a target", "holds LlamaForCausalLM and no draft head"),
        (
            "a head for another",
            "holds an EAGLE-3 head for another model: config.json: vocab_size is 268",
        ),
    ],
)
def test_what_is_no_draft_head_of_the_model_is_told_with_what_it_is_and_what_would_fit(
    held: str, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny_model(tmp_path / "other", "llama")
    model = save_tiny_model(tmp_path / "model", "llama", vocab_size=300)
    draft = other if held == "a target" else save_eagle3_head(tmp_path / "head", target_dir=other)
    argv = [f"--model={model}", f"--draft={draft}"]
    capfd.readouterr()
    try:
        assert run_service("decode_service", DecodeSettings, lambda: _never_served, argv) == EXIT_STARTUP
    finally:
        gc.unfreeze()
    *_, last = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert last["error"].startswith(f"draft: {draft}: {says}"), last["error"]
    assert last["error"].endswith(f"head that was made for {model} would fit")


async def _never_served(settings: ServiceSettings, process: Process) -> None:
    raise AssertionError("it was served")


@pytest.mark.parametrize(
    ("argv", "interval_s"), [([], 0.0005), (["--disabled-fast-paths=short_switch_interval"], 0.005)]
)
def test_threads_hand_the_interpreters_lock_over_early(argv: list[str], interval_s: float) -> None:
    seen: list[float] = []
    before = sys.getswitchinterval()

    def import_serve() -> Serve[DecodeSettings]:
        seen.append(sys.getswitchinterval())
        raise StartupError("far enough")

    try:
        sys.setswitchinterval(0.005)
        assert run_service("decode_service", DecodeSettings, import_serve, argv) == EXIT_STARTUP
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()
    assert seen == [pytest.approx(interval_s)]
