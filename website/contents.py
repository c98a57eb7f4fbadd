"""The table of contents: that of `docs/README.md`, and the pages that only the site has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from website.paths import ROOT

DOCS: Final = ROOT / "docs"
_SECTION: Final = re.compile(r"^## (.+)$", re.MULTILINE)
_ENTRY: Final = re.compile(r"^- \[([^\]]+)\]\(([^)#:]+)\.md\)", re.MULTILINE)

Sections = dict[str, list[str]]
"""Entries of the side bar by the heading above them: a page without `.md`, or `Title <page>`."""


def sections(index: str, pages: Iterable[str]) -> Sections:
    """The sections of the table of contents.

    A folder of pages is a section of its own; a page that the index does not list is under "More".

    Args:
        index: the text of `docs/README.md`.
        pages: all pages of `docs/`, relative to it.
    """
    _, *parts = _SECTION.split(index)
    found = {
        title: [f"{label} <{page}>" for label, page in _ENTRY.findall(body)]
        for title, body in zip(parts[::2], parts[1::2], strict=True)
    }
    found = {title: listed for title, listed in found.items() if listed}
    known = {page for _, page in _ENTRY.findall(index)}
    for page in sorted(name.removesuffix(".md") for name in pages if name != "README.md"):
        if page not in known:
            folder, _, _ = page.rpartition("/")
            found.setdefault(folder.capitalize() or "More", []).append(page)
    return found


def pages_of_docs() -> list[str]:
    """The Markdown files of `docs/`, relative to it."""
    return sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def toctree(caption: str, pages: Iterable[str]) -> str:
    """The directive for one section of the side bar."""
    listed = "\n".join(pages)
    return f"```{{toctree}}\n:hidden:\n:maxdepth: 1\n:caption: {caption}\n\n{listed}\n```\n"


def index_page(text: str, found: Sections) -> str:
    """The site's first page: the index of the repository, and the side bar."""
    return text + "\n" + "\n".join(toctree(title, pages) for title, pages in found.items())
