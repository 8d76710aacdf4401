"""Links between our pages work, the index names every page, and files that pages name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator

from scripts.lint.pages import DOCS, all_pages, anchors, code_spans, links, without_code_blocks
from scripts.lint.problem import ROOT, Problem, line_of, set_apart


def links_lead_to_files_and_headings() -> Iterator[Problem]:
    for page in all_pages():
        for link in links(page):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                yield Problem(page, line_of(page.read_text(), f"({link})"), f"{link} leads nowhere")


def the_index_names_every_page() -> Iterator[Problem]:
    index = DOCS / "README.md"
    named = {link.partition("#")[0] for link in links(index)}
    pages = {page.name for page in DOCS.glob("*.md")} - {index.name}
    yield from set_apart(index, "page", named & pages, pages)


def files_that_pages_name_exist() -> Iterator[Problem]:
    """Pages may leave away the first folders of a name."""
    files = [path.relative_to(ROOT).parts for path in ROOT.glob("*/**/*.py") if ".venv" not in path.parts]
    known = {"/".join(parts[start:]) for parts in files for start in range(len(parts))}
    for page in all_pages():
        text = page.read_text()
        for span in code_spans(without_code_blocks(text)):
            if (named := re.fullmatch(r"([\w/]+\.py)(?:::.*)?", span)) and named[1] not in known:
                yield Problem(page, line_of(text, f"`{span}`"), f"{named[1]} does not exist")
