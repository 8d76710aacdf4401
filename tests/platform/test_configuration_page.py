"""docs/configuration.md has every setting of every service, with its default, and no other."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from common.config.fast_paths import FastPath
from tests.platform.pages import DOCS, ROOT, code_spans, module_name, table_rows

PAGE = DOCS / "configuration.md"
MODULES = [*sorted((ROOT / "common/config").glob("*.py")), *sorted((ROOT / "gateway").rglob("*settings*.py"))]
UNITS = {"MiB": 1 << 20, "KiB": 1 << 10}


def settings_classes() -> list[type[BaseSettings]]:
    found: dict[str, type[BaseSettings]] = {}
    for path in MODULES:
        for name, value in vars(importlib.import_module(module_name(Path(path)))).items():
            if isinstance(value, type) and issubclass(value, BaseSettings) and value is not BaseSettings:
                found[name] = value
    return list(found.values())


def documented() -> dict[str, list[str]]:
    """The cells of each setting's default: one in each table that has it."""
    cells: dict[str, list[str]] = {}
    for row in table_rows(PAGE, "setting"):
        for name in code_spans(row[0]):
            cells.setdefault(name, []).append(row[1])
    return cells


def test_every_setting_is_there_and_no_other() -> None:
    fields = {name for kind in settings_classes() for name in kind.model_fields}
    assert set(documented()) == fields


def test_every_fast_path_is_there_with_what_the_code_says_of_it_and_no_other() -> None:
    assert table_rows(PAGE, "fast path") == [[f"`{path}`", path.meaning] for path in FastPath]


@pytest.mark.parametrize("kind", settings_classes(), ids=lambda kind: kind.__name__)
def test_defaults_are_those_of_the_code(kind: type[BaseSettings]) -> None:
    cells = documented()
    wrong = [name for name, field in kind.model_fields.items() if not any(says(cell, field) for cell in cells[name])]
    assert wrong == []


def says(cell: str, field: FieldInfo) -> bool:
    """Whether a cell gives the field's default; of one that means "nothing is set" it may say what that means."""
    default: Any = field.get_default(call_default_factory=False)
    if field.is_required() or default is None or default in ("", ()):
        return True
    if isinstance(default, bool):
        return cell == ("on" if default else "off")
    if isinstance(default, int | float):
        return number(cell) == default
    return all(f"`{each}`" in cell for each in ([default] if isinstance(default, str) else default))


def number(cell: str) -> float | None:
    digits, _, unit = cell.partition(" ")
    try:
        return float(digits.replace(",", "")) * UNITS.get(unit, 1)
    except ValueError:
        return None
