"""Writes the tables of docs/configuration.md, which describe every setting and every fast path, from the code.

python -m scripts.settings_tables
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from common.config.fast_paths import FastPath
from common.config.settings import DecodeSettings, GatewaySettings, PrefillSettings, ProcessSettings, ServiceSettings

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
KINDS: dict[str, type[ProcessSettings]] = {
    "Every process": ProcessSettings,
    "Both services": ServiceSettings,
    "Prefill": PrefillSettings,
    "Decode": DecodeSettings,
    "Gateway": GatewaySettings,
}
"""The settings class for each heading. The heading's table lists the settings that this class itself declares."""


def with_tables(page: str) -> str:
    """Returns `page` with each table rewritten from the code. Raises ValueError for a heading that has no table."""
    tables = {heading: _settings_table(kind) for heading, kind in KINDS.items()}
    for heading, table in {**tables, "Fast paths": _fast_paths_table()}.items():
        page, num_tables = re.subn(
            rf"(^#+ {heading}\n(?:(?![#|]).*\n)*)(?:\|.*\n)+",
            lambda found, table=table: found[1] + table,  # type: ignore[misc]
            page,
            flags=re.MULTILINE,
        )
        if num_tables != 1:
            raise ValueError(f"{num_tables} tables under {heading!r}")
    return page


def _settings_table(kind: type[ProcessSettings]) -> str:
    own = [name for name in inspect.get_annotations(kind) if name in kind.model_fields]
    fields = [(name, kind.model_fields[name]) for name in own]
    rows = [(f"`{name}`", _default(name, field), _meaning(field)) for name, field in fields if not field.is_required()]
    return _table("setting", "default", "meaning", rows=rows)


def _fast_paths_table() -> str:
    rows = [(f"`{path}`", path.meaning) for path in FastPath]
    return _table("fast path", "what it does, and when to switch it off", rows=rows)


def _table(*headings: str, rows: Sequence[Sequence[str]]) -> str:
    head, *body = (f"| {' | '.join(cells)} |\n" for cells in (headings, *rows))
    return "".join((head, "|" + "---|" * len(headings) + "\n", *body))


def _default(name: str, field: FieldInfo) -> str:
    default: Any = field.default
    match default:
        case bool():
            return "on" if default else "off"
        case None | "":
            return "unset"
        case ():
            return "none"
        case int() if name.endswith("_bytes"):
            return f"{default >> 20} MiB"
        case int() | float():
            return f"{default:g}"
        case tuple():
            return ", ".join(f"`{each}`" for each in default)
        case _:
            return f"`{default}`"


def _meaning(field: FieldInfo) -> str:
    if get_origin(field.annotation) is not Literal:
        return str(field.description)
    return f"{field.description} One of {', '.join(f'`{each}`' for each in get_args(field.annotation))}."


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
