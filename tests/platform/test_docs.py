"""Links between our pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def links(page: Path) -> list[str]:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return [target.partition("#")[0] for target in targets if "://" not in target and not target.startswith("#")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    assert [link for link in links(page) if not (page.parent / link).exists()] == []


def test_the_index_names_every_page() -> None:
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(links(ROOT / "docs/README.md"))
