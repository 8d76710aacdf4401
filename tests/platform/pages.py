"""Our pages as the tests of them read them: links, headings, tables, quoted commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CODE_PACKAGES = ("baton", "baton_cpu", "common", "prefill_service", "decode_service", "gateway")
_SKIPPED = {".venv", "node_modules", "build", "dist"}


def all_pages() -> list[Path]:
    """Every page of the repository, those of .venv and of hidden folders left out."""
    return [page for page in sorted(ROOT.rglob("*.md")) if not _is_skipped(page)]


def _is_skipped(page: Path) -> bool:
    folders = page.relative_to(ROOT).parts[:-1]
    return any(folder in _SKIPPED or folder.startswith(".") for folder in folders)


def links(page: Path) -> list[str]:
    """Targets of the page's links to this repository, with their anchors."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return [target for target in targets if "://" not in target]


def anchors(page: Path) -> set[str]:
    """What `#...` may name on the page: its headings, as they are shown on the web."""
    headings = re.findall(r"^#+ (.+)$", _without_code_blocks(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _without_code_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def table_rows(page: Path, first_heading: str) -> list[list[str]]:
    """The cells of every row of the page's tables whose first column has this heading."""
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
    return re.findall(r"`([^`]+)`", text)


def quoted_commands(page: Path) -> Iterator[str]:
    """What a reader is told to type: lines of console blocks, and code in the text that begins like a command."""
    text = page.read_text()
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from re.findall(r"^\$ (.+)$", block.replace("\\\n", " "), re.MULTILINE)
    yield from re.findall(r"`((?:make|baton|python3? -m) [^`]+)`", _without_code_blocks(text))


def sources() -> list[Path]:
    """The modules of what is installed and serves."""
    return [module for package in CODE_PACKAGES for module in sorted((ROOT / package).rglob("*.py"))]


def module_name(module: Path) -> str:
    return ".".join(module.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
