"""Tests of the application's arguments, and of those in deploy/ray."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from baton_ray.arguments import Args, settings_of
from baton_ray.scaling import LoadPolicy
from common.errors import ConfigError

FILES = sorted((Path(__file__).parents[2] / "deploy" / "ray").glob("*.yaml"))


def test_settings_become_flags_and_those_of_services_are_for_prefill_and_decode() -> None:
    args = Args(
        services={"model": "demo", "tf32": True, "draft": None},
        decode={"max_rows": 4},
        gateway={"served_model_name": ["a", "b"], "status_page": False},
    )
    assert args.flags("prefill") == ["--model=demo", "--tf32"]
    assert args.flags("decode") == ["--model=demo", "--tf32", "--max-rows=4"]
    gateway = settings_of("gateway", args.flags("gateway"))
    assert (gateway.served_model_name, gateway.status_page) == (("a", "b"), False)
    assert settings_of("decode", args.flags("decode")).tf32


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ({"decoding": {}}, ValidationError, "decoding"),
        ({"decode": {"prefill": "a:1"}}, ConfigError, "decode: prefill cannot be set"),
        ({"services": {"listen": "a:1"}}, ConfigError, "prefill: listen cannot be set"),
        ({"gateway": {"decode_tls": True}}, ConfigError, "gateway: decode_tls cannot be set"),
        ({"prefill": {"other_role": "a.yaml"}}, ConfigError, "prefill: other_role cannot be set, because Serve scales"),
        ({"services": {"tls_cert": "a"}}, ConfigError, "prefill: tls_cert cannot be set"),
        ({"prefill": {"other-role": "a.yaml"}}, ConfigError, "prefill: other_role cannot be set"),
        ({"services": {"tls-cert": "a"}}, ConfigError, "prefill: tls_cert cannot be set"),
        ({"gateway": {"config": "a.yaml"}}, ConfigError, "gateway: config cannot be set"),
        ({"decode": {"help": True}}, ConfigError, "decode: unknown key: help"),
        ({"decode": {"max_rows=4 --help": True}}, ConfigError, "decode: unknown key"),
        ({"gateway": {"log_level": "warning"}}, ConfigError, "gateway: log_level cannot be warning"),
        ({"decode": {"max_rows": 0}}, ConfigError, "max_rows"),
        ({"decode": {"max_row": 1}}, ConfigError, "max.row"),
    ],
)
def test_what_cannot_be_set_is_told_by_its_name(args: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        asked = Args.model_validate(args)
        for role in ("prefill", "decode", "gateway"):
            settings_of(role, asked.flags(role))


@pytest.mark.parametrize("variable", ["BATON_OTHER_ROLE", "baton_other_role"])
def test_what_cannot_be_set_cannot_be_set_in_the_environment(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "a.yaml")
    with pytest.raises(ConfigError, match="prefill: other_role cannot be set"):
        settings_of("prefill", [])


def test_a_file_that_the_environment_names_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (file := tmp_path / "a.yaml").write_text("other_role: a.yaml")
    monkeypatch.setenv("BATON_CONFIG", str(file))
    with pytest.raises(ConfigError, match="decode: config cannot be set"):
        settings_of("decode", [])


def test_the_setting_of_one_kind_wins_however_it_is_spelt() -> None:
    assert Args(services={"max_rows": 4}, decode={"max-rows": 8}).flags("decode") == ["--max-rows=8"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_files_of_deploy_serve_what_they_say(file: Path) -> None:
    config = yaml.safe_load(file.read_text())
    assert config["http_options"]["host"] == "127.0.0.1", "no keys are set"
    (application,) = config["applications"]
    assert application["import_path"] == "baton_ray.application:build"
    args = Args.model_validate(application["args"])
    for role in ("prefill", "decode", "gateway"):
        settings_of(role, args.flags(role))
    prefill, decode, gateway = application["deployments"]
    assert [each["name"] for each in (prefill, decode, gateway)] == ["prefill", "decode", "gateway"]
    for deployment in (prefill, decode):
        policy = deployment["autoscaling_config"]["policy"]
        module, _, name = policy["policy_function"].partition(":")
        assert getattr(importlib.import_module(module), name) is LoadPolicy
        LoadPolicy(**policy["policy_kwargs"])
