"""docs/configuration.md lists exactly the settings of all services, as the code describes them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from pydantic_settings import BaseSettings

from scripts.lint.pages import code_spans, module_name, table_rows
from scripts.lint.problem import ROOT, Problem, set_apart
from scripts.settings_tables import PAGE, with_tables


def the_tables_are_those_of_the_code() -> Iterator[Problem]:
    lines, written = PAGE.read_text().splitlines(), with_tables(PAGE.read_text()).splitlines()
    for number, (line, wanted) in enumerate(zip([*lines, ""], [*written, ""], strict=False), start=1):
        if line != wanted:
            yield Problem(PAGE, number, "is not what `python -m scripts.settings_tables` writes")
            return


def every_setting_is_there() -> Iterator[Problem]:
    """A settings class that the tables do not know is found here."""
    modules = [*sorted((ROOT / "common/config").glob("*.py")), *sorted((ROOT / "gateway").rglob("*settings*.py"))]
    declared = {
        name
        for module in modules
        for kind in vars(importlib.import_module(module_name(module))).values()
        if isinstance(kind, type) and issubclass(kind, BaseSettings)
        for name in kind.model_fields
    }
    there = {name for row in table_rows(PAGE, "setting") for name in code_spans(row[0])}
    yield from set_apart(PAGE, "setting", there, declared)
