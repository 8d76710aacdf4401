from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from common.config.fast_paths import FastPath
from common.config.load import load_settings, log_format_asked
from common.config.settings import DecodeSettings, GatewaySettings, PrefillSettings, ProcessSettings
from common.errors import ConfigError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)


def decode(*argv: str) -> DecodeSettings:
    return load_settings(DecodeSettings, argv, program="decode_service")


def prefill(*argv: str) -> PrefillSettings:
    return load_settings(PrefillSettings, argv, program="prefill_service")


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return f"--config={path}"


def test_defaults_listen_on_loopback_and_find_each_other() -> None:
    assert (decode().listen, prefill().listen) == ("127.0.0.1:50051", "127.0.0.1:50052")
    assert decode().prefill == (prefill().listen,)
    assert (decode().model, decode().dtype, decode().device) == ("demo", "bfloat16", "cpu")


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "decode.yaml", "max_rows: 1\nmax_kv_tokens: 1\nlog_level: debug\n")
    monkeypatch.setenv("BATON_MAX_ROWS", "2")
    monkeypatch.setenv("BATON_MAX_KV_TOKENS", "2")

    settings = decode(file, "--max-rows=3")

    assert (settings.max_rows, settings.max_kv_tokens, settings.log_level, settings.adaptive_depth) == (
        3,
        2,
        "debug",
        True,
    )


def test_the_environment_may_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "prefill.yaml", "chunk-tokens: 16\n")
    monkeypatch.setenv("BATON_CONFIG", str(tmp_path / "prefill.yaml"))

    assert prefill().chunk_tokens == 16


@pytest.mark.parametrize(
    "argv",
    [("--prefill=a:1,b:2",), ("--prefill", "a:1", "--prefill", "b:2"), ("--prefill", "a:1, b:2")],
)
def test_prefill_replicas_are_listed_with_commas_or_by_repeating(argv: tuple[str, ...]) -> None:
    assert decode(*argv).prefill == ("a:1", "b:2")


def test_prefill_replicas_may_be_those_behind_names() -> None:
    names = ("dns:///a:1", "b:2", "dns:///c:3", "file:///d/e")
    assert decode(f"--prefill={','.join(names)}").prefill == names


def test_prefill_replicas_from_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode(written(tmp_path / "list.yaml", "prefill: [a:1, b:2]")).prefill == ("a:1", "b:2")
    monkeypatch.setenv("BATON_PREFILL", "c:1,d:2")
    assert decode().prefill == ("c:1", "d:2")


def test_a_switch_has_a_negative() -> None:
    assert decode().adaptive_depth
    assert not decode("--no-adaptive-depth").adaptive_depth


@pytest.mark.parametrize(
    "argv",
    [
        ("--disabled-fast-paths=overlap,cuda_graphs",),
        ("--disabled-fast-paths", "overlap, cuda_graphs"),
        ("--disabled-fast-paths=overlap", "--disabled-fast-paths=cuda_graphs", "--disabled-fast-paths=overlap"),
    ],
)
def test_fast_paths_are_switched_off_by_name_and_all_others_are_used(argv: tuple[str, ...]) -> None:
    assert all(map(decode().uses, FastPath))
    settings = decode(*argv)
    assert [path for path in FastPath if not settings.uses(path)] == [FastPath.OVERLAP, FastPath.CUDA_GRAPHS]


def test_fast_paths_are_named_in_the_environment_and_in_a_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One environment serves both services, so each accepts names that only the other one uses."""
    assert not prefill(written(tmp_path / "a.yaml", "disabled_fast_paths: [cuda_graphs]")).uses(FastPath.CUDA_GRAPHS)
    monkeypatch.setenv("BATON_DISABLED_FAST_PATHS", "early_sending")
    assert decode().disabled_fast_paths == prefill().disabled_fast_paths == (FastPath.EARLY_SENDING,)


def test_an_unknown_fast_path_is_refused_by_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as error:
        decode("--disabled-fast-paths=overlap,speed")
    assert str(error.value).startswith("disabled_fast_paths: there is no fast path 'speed', only overlap, ")
    assert all(path in str(error.value) for path in FastPath)


@pytest.mark.parametrize(
    ("flags", "num_tokens"),
    [
        ((), 128),
        (("--device=cuda",), 0),
        (("--local-prefill-tokens=0",), 0),
        (("--device=cuda:1", "--local-prefill-tokens=7"), 7),
    ],
)
def test_a_decode_service_on_a_cpu_computes_short_prompts_itself(flags: tuple[str, ...], num_tokens: int) -> None:
    assert decode(*flags).max_short_prompt == num_tokens


def test_an_unknown_key_of_the_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key: max_row$"):
        decode(written(tmp_path / "decode.yaml", "max_row: 1"))


def test_an_unknown_variable_is_refused_by_name_unless_it_is_the_other_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATON_CHUNK_TOKENS", "16")
    monkeypatch.setenv("BATON_TOKEN_FILE", "the client's")
    assert decode().max_rows is None

    monkeypatch.setenv("BATON_CHUNKS", "16")
    with pytest.raises(ConfigError, match="BATON_CHUNKS"):
        decode()


@pytest.mark.parametrize("flag", ["--max-row=1", "--max_rows=1", "--chunk-tokens=16"])
def test_an_unknown_flag_is_refused_by_name(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"unrecognized arguments: {flag}"):
        decode(flag)


@pytest.mark.parametrize(
    ("key", "flag"),
    [
        ("listen", "--listen=50051"),
        ("listen", "--listen=host:port"),
        ("listen", "--listen=http://127.0.0.1:50051"),
        ("listen", "--listen=[]:50051"),
        ("listen", "--listen=127.0.0.1:٣"),
        ("'http://a:1' is not HOST:PORT: leave http:// away", "--prefill=http://a:1"),
        ("dtype", "--dtype=int8"),
        ("max_rows", "--max-rows=0"),
        ("max_rows", "--max-rows=many"),
        ("max_context_tokens: Input should be greater than or equal to 2, not '1'", "--max-context-tokens=1"),
        ("prefill_timeout_s", "--prefill-timeout-s=0"),
        ("prefill_timeout_s", "--prefill-timeout-s=nan"),
        ("grace_period_s", "--grace-period-s=-1"),
        ("prefill", "--prefill=,"),
        ("prefill", "--prefill=a:1,a:1"),
        ("prefill", "--prefill=dns:a:1"),
        ("prefill", "--prefill=dns://server/a:1"),
        ("prefill", "--prefill=dns:///a"),
        ("prefill", "--prefill=file:a"),
        ("prefill", "--prefill=file://a"),
        ("prefill", "--prefill=file:///"),
        ("tls_cert", "--tls-cert=cert.pem"),
        ("max_streams", "--max-streams=0"),
        ("otlp_endpoint", "--otlp-endpoint=collector:4317"),
        ("otlp_endpoint", "--otlp-endpoint=http://collector"),
        ("trace_sample_ratio", "--trace-sample-ratio=1.5"),
        ("max_request_bytes", "--max-request-bytes=1000"),
        ("max_request_bytes", "--max-request-bytes=16777217"),
    ],
)
def test_a_value_out_of_range_is_refused_by_its_key(key: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=key):
        decode(flag)


def test_a_wrong_value_is_told_with_what_would_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^dtype: Input should be 'float32', .* or 'float16', not 'int8'$"):
        decode("--dtype=int8")
    with pytest.raises(ConfigError, match=r"^max_rows: Input should be greater than or equal to 1, not '0'$"):
        decode(written(tmp_path / "decode.yaml", "max_rows: 0"))
    monkeypatch.setenv("BATON_MAX_ROWS", "many")
    with pytest.raises(ConfigError, match=r"^max_rows: Input should be a valid integer, .*, not 'many'$"):
        decode()


@pytest.mark.parametrize(
    ("key", "argv"),
    [
        ("max_segment_bytes", ["--max-segment-bytes=8388609"]),
        ("max_batch_tokens", ["--max-batch-tokens=16"]),
    ],
)
def test_prefill_limits(key: str, argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=key):
        prefill(*argv)


def test_a_file_says_what_flags_say(tmp_path: Path) -> None:
    read = decode(written(tmp_path / "texts.yaml", "max_rows: 010\nmax_kv_tokens: null"))
    assert (read.max_rows, read.max_kv_tokens) == (decode("--max-rows=010").max_rows, None)
    for text in ("max_rows: true", "max_rows: 1:30", "grace_period_s: true", "grace_period_s: 1:30"):
        key = text.partition(":")[0]
        with pytest.raises(ConfigError, match=f"^{key}: "):
            decode(written(tmp_path / "texts.yaml", text))


@pytest.mark.parametrize("text", ["- a list", "a: [", "config: other.yaml"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="config"):
        decode(written(tmp_path / "bad.yaml", text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        decode(f"--config={tmp_path / 'absent.yaml'}")


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        decode().max_rows = 5


@pytest.mark.parametrize("flag", ["--draft-topk=2", "--num-draft-tokens=3", "--num-draft-steps=3"])
def test_speculation_is_not_set_up_without_a_head(flag: str) -> None:
    name = flag.removeprefix("--").split("=")[0].replace("-", "_")
    for argv in (["--draft=none"], ["--model=owner/name"], ["--model=owner/name", "--draft="]):
        with pytest.raises(ConfigError, match=f"{name} needs draft"):
            decode(flag, *argv)
    decode(flag)  # for the demo model's own head
    decode("--model=owner/name", "--draft=owner/head", flag)


@pytest.mark.parametrize(
    ("argv", "head"),
    [
        ((), "demo"),
        (("--model=demo",), "demo"),
        (("--draft=",), "demo"),
        (("--draft=none",), ""),
        (("--draft=owner/head",), "owner/head"),
        (("--model=owner/name",), ""),
        (("--model=owner/name", "--draft="), ""),
        (("--model=owner/name", "--draft=none"), ""),
        (("--model=owner/name", "--draft=demo"), "demo"),
    ],
)
def test_the_demo_model_has_its_own_head_in_both_services_unless_told_otherwise(
    argv: tuple[str, ...], head: str
) -> None:
    assert (decode(*argv).draft, prefill(*argv).draft) == (head, head)


def test_an_empty_variable_leaves_the_demo_model_its_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_DRAFT", "")
    assert decode().draft == prefill().draft == "demo"
    monkeypatch.setenv("BATON_DRAFT", "none")
    assert decode().draft == prefill().draft == ""
    assert decode("--draft=owner/head").draft == "owner/head"
    assert decode(written(tmp_path / "decode.yaml", "draft: other/head")).draft == "", "the file comes last"


def test_the_format_to_say_mistakes_in_comes_from_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path / "decode.yaml", "log_format: console\nno_such_key: 1\n")
    assert log_format_asked(["--no-such-flag", "x", "--max-rows=0"]) == "json"
    assert log_format_asked(["--no-such-flag", "x", "--log-format", "console", "--max-rows=0"]) == "console"
    assert log_format_asked([file]) == "console"
    assert log_format_asked([file, "--log-format=json"]) == "json"
    assert log_format_asked(["--help"]) == log_format_asked(["-h"]) == "json", "the settings' own help follows"
    for unreadable in (["--log-format=xml"], ["--log-format"], ["--config=absent.yaml"]):
        assert log_format_asked(unreadable) == "json"
    monkeypatch.setenv("BATON_LOG_FORMAT", "console")
    assert log_format_asked(["--max-rows=0"]) == "console"


@pytest.mark.parametrize("kind", [PrefillSettings, DecodeSettings, GatewaySettings])
def test_help_explains_every_setting_with_its_default_and_an_example(
    kind: type[ProcessSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        load_settings(kind, ["--help"], program="program")
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0
    for name in kind.model_fields:
        flag = f"--{name.replace('_', '-')}"
        (place,) = [at for at, line in enumerate(lines) if re.match(rf"{flag}\b(?!-)", line)]
        assert re.fullmatch(r"    \S.{10,}", lines[place + 1]), f"{name} is not explained"
        assert not any(line.startswith(" ") for line in lines[place + 2 : place + 3]), f"{name} takes more than a line"
        assert "None" not in lines[place + 1]
    listed = [path for path in FastPath if path in lines and lines[lines.index(path) + 1] == f"    {path.meaning}"]
    assert listed == ([] if kind is GatewaySettings else list(FastPath))
    assert any(line.endswith(f"(default: {kind.model_fields['listen'].default})") for line in lines)
    (example,) = [line.partition("python -m program ")[2] for line in lines if line.startswith("example: ")]
    assert load_settings(kind, example.split(), program="program").listen in example


def test_weights_of_tenants_are_named_once_and_above_zero() -> None:
    assert decode("--tenant-weights", "key 0=3,*=0.5").tenant_weights == ("key 0=3", "*=0.5")
    for wrong in ("a", "=2", "a=0", "a=-1", "a=nan", "a=1,a=2"):
        with pytest.raises(ConfigError, match="tenant_weights"):
            decode("--tenant-weights", wrong)
