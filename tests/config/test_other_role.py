"""Tests of the settings that a process has in its other role."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config.load import FIXED, SETTINGS_OF, load_settings, other_settings
from common.config.settings import DecodeSettings, PrefillSettings
from common.errors import ConfigError
from common.role import Role


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "other.yaml"


def test_without_a_file_there_is_no_other_role() -> None:
    assert other_settings(PrefillSettings()) is None


def test_what_both_roles_have_is_the_same_unless_the_file_says_otherwise(file: Path) -> None:
    file.write_text("prefill: 10.0.0.7:50052\nmax-rows: 5\n")
    own = PrefillSettings(
        other_role=file, model="somewhere", listen="10.0.0.8:1", max_rows=9, max_kv_tokens=77, grace_period_s=3.0
    )
    other = other_settings(own)
    assert isinstance(other, DecodeSettings)
    assert other.prefill == ("10.0.0.7:50052",) and other.max_rows == 5
    same = ("model", "listen", "max_kv_tokens", "grace_period_s", "draft")
    assert [getattr(other, name) for name in same] == [getattr(own, name) for name in same]


def test_a_decode_service_needs_nothing_to_be_a_prefill_service(file: Path) -> None:
    file.write_text("")
    other = other_settings(DecodeSettings(other_role=file, draft="none", listen="10.0.0.8:1"))
    assert isinstance(other, PrefillSettings) and other.listen == "10.0.0.8:1" and other.draft == ""


def test_what_the_file_leaves_open_may_be_in_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("")
    monkeypatch.setenv("BATON_PREFILL", "10.0.0.9:50052")
    monkeypatch.setenv("BATON_MAX_ROWS", "5")
    other = other_settings(PrefillSettings(other_role=file, max_rows=6))
    assert isinstance(other, DecodeSettings) and other.prefill == ("10.0.0.9:50052",) and other.max_rows == 6


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("max_row: 3", "unknown key: max_row"),
        ("max_rows: 0", "max_rows: Input should be greater than or equal to 1"),
        ("model: other", "model: is the same in both roles, and set for the process"),
        ("[1]", "is not a mapping of keys to values"),
        ("prefill: 127.0.0.1:50052", "prefill names no service but this one itself"),
        ("", "prefill names no service but this one itself"),  # the default is this service's own address
    ],
)
def test_a_wrong_file_is_told_at_the_start_with_its_name(file: Path, text: str, error: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as told:
        other_settings(PrefillSettings(other_role=file))
    assert str(told.value).startswith(f"other_role: {file}: ") and error in str(told.value)


def test_a_file_that_is_not_there_is_told(file: Path) -> None:
    with pytest.raises(ConfigError, match=f"^other_role: {file}: "):
        other_settings(PrefillSettings(other_role=file))


def test_what_is_fixed_is_a_setting_of_both_roles() -> None:
    for kind in SETTINGS_OF.values():
        assert kind.model_fields.keys() >= FIXED


def test_every_role_has_settings_that_say_so() -> None:
    assert {role: kind.role for role, kind in SETTINGS_OF.items()} == {role: role for role in Role}


def test_a_decode_service_may_list_itself_beside_others() -> None:
    settings = load_settings(DecodeSettings, ["--prefill=127.0.0.1:50051,127.0.0.1:50052"], program="decode_service")
    assert len(settings.prefill) == 2
