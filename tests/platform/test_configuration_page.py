"""Tests that docs/configuration.md lists exactly the settings of all services, as the code describes them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

from scripts.settings_tables import PAGE, with_tables
from tests.platform.pages import ROOT, code_spans, module_name, table_rows

MODULES = [*sorted((ROOT / "common/config").glob("*.py")), *sorted((ROOT / "gateway").rglob("*settings*.py"))]


def settings_classes() -> list[type[BaseSettings]]:
    found: dict[str, type[BaseSettings]] = {}
    for path in MODULES:
        for name, value in vars(importlib.import_module(module_name(Path(path)))).items():
            if isinstance(value, type) and issubclass(value, BaseSettings) and value is not BaseSettings:
                found[name] = value
    return list(found.values())


def test_its_tables_are_those_of_the_code() -> None:
    """`python -m scripts.settings_tables` writes the tables."""
    assert with_tables(PAGE.read_text()) == PAGE.read_text()


def test_every_setting_is_there_and_no_other() -> None:
    fields = {name for kind in settings_classes() for name in kind.model_fields}
    assert {name for row in table_rows(PAGE, "setting") for name in code_spans(row[0])} == fields


def test_a_page_without_one_of_the_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="0 tables under 'Gateway'"):
        with_tables(PAGE.read_text().replace("## Gateway", "## Edge"))
