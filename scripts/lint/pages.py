"""Parses our Markdown pages: links, headings, tables and quoted commands. Finds our modules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from scripts.lint.problem import ROOT

DOCS = ROOT / "docs"
CODE_PACKAGES = ("baton", "baton_cpu", "baton_ray", "common", "prefill_service", "decode_service", "gateway")
_SKIPPED = {".venv", "node_modules", "build", "dist"}


def all_pages() -> list[Path]:
    """Returns all Markdown pages of the repository, without .venv and hidden folders."""
    return [page for page in sorted(ROOT.rglob("*.md")) if not _is_skipped(page)]


def _is_skipped(page: Path) -> bool:
    folders = page.relative_to(ROOT).parts[:-1]
    return any(folder in _SKIPPED or folder.startswith(".") for folder in folders)


def links(page: Path) -> list[str]:
    """Returns the page's links to files of this repository, with their anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return [target for target in targets if "://" not in target]


def anchors(page: Path) -> set[str]:
    """Returns the page's anchors: its headings, converted as on GitHub."""
    headings = re.findall(r"^#+ (.+)$", without_code_blocks(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_code_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def table_rows(page: Path, first_heading: str) -> list[list[str]]:
    """Returns the cells of every row of the page's tables whose first column has this heading."""
    rows: list[list[str]] = []
    is_wanted = is_inside = False
    for line in page.read_text().splitlines():
        if not line.startswith("|"):
            is_inside = False
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not is_inside:
            is_inside, is_wanted = True, cells[0] == first_heading
        elif is_wanted and not set(cells[0]) <= set("-: "):
            rows.append(cells)
    return rows


def code_spans(text: str) -> list[str]:
    """Returns what stands between single backticks in a text without code blocks."""
    return re.findall(r"`([^`]+)`", text)


def quoted_commands(page: Path) -> Iterator[str]:
    """Yields the commands that a page tells its reader to type: lines of console blocks, and inline code that starts
    like a command.
    """
    text = page.read_text()
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from re.findall(r"^\$ (.+)$", block.replace("\\\n", " "), re.MULTILINE)
    yield from re.findall(r"`((?:make|baton|python3? -m) [^`]+)`", without_code_blocks(text))


def sources() -> list[Path]:
    """Returns all modules of the packages with which services and clients run."""
    return [module for package in CODE_PACKAGES for module in sorted((ROOT / package).rglob("*.py"))]


def module_name(module: Path) -> str:
    return ".".join(module.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
