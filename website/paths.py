"""Where a file of the repository is on the site, and links that follow it there.

The pages are written for a reader of the repository: `[sync.py](../src/tutti/strategies/sync.py)`. On the
site a page of `docs/` is at the top, a page that is made from a file stands for it, and any other file that
a page links to is a page with its text.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
"""The repository."""

SITE_OF: Final = {
    "docs/README.md": "index.md",
    "README.md": "index.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/RESULTS.md": "performance.md",
}
"""Pages that are elsewhere on the site than in the repository."""

_FENCE: Final = re.compile(r"^([ \t]*)(`{3,}|~{3,}).*?^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()\s]+)\)")
_ELSEWHERE: Final = re.compile(r"[a-z][a-z0-9+.-]*:|#")


class DeadLink(Exception):
    """A page links to a file that is not there."""


@dataclass
class SiteMap:
    """Where each file of the repository is on the site.

    Attributes:
        made: the places of pages that are made from a file, by that file.
        wanted: files that pages link to and that are no pages of their own, with their place on the site.
    """

    made: dict[str, str]
    wanted: dict[str, str] = field(default_factory=dict)

    def place(self, path: str) -> str:
        """The place on the site of a file or folder, given by its path in the repository."""
        known = SITE_OF | self.made
        if path in known:
            return known[path]
        if path.startswith("docs/"):
            return path.removeprefix("docs/")
        self.wanted[path] = f"files/{path}.md"
        return self.wanted[path]

    def rewrite(self, text: str, path: str) -> str:
        """The text of a page with its links as they are on the site.

        Args:
            text: Markdown.
            path: the page's path in the repository.

        Raises:
            DeadLink: a link names no file.
        """
        here = posixpath.dirname(path)
        there = posixpath.dirname(self.place(path))

        def follow(match: re.Match[str]) -> str:
            label, target = match.groups()
            if _ELSEWHERE.match(target):
                return match[0]
            name, hash_, anchor = target.partition("#")
            found = posixpath.normpath(posixpath.join(here, name))
            if not (ROOT / found).exists():
                raise DeadLink(
                    f"{path} links to {target}, but there is no {found}; name a file of the repository"
                )
            return f"{label}({posixpath.relpath(self.place(found), there or '.')}{hash_}{anchor})"

        pieces, end = [], 0
        for fence in _FENCE.finditer(text):
            pieces += [_LINK.sub(follow, text[end : fence.start()]), fence[0]]
            end = fence.end()
        return "".join([*pieces, _LINK.sub(follow, text[end:])])


def page_of_file(path: str) -> str:
    """The page that shows a file, or lists a folder, which other pages link to."""
    file = ROOT / path
    if file.is_dir():
        names = sorted(entry.name for entry in file.iterdir() if not entry.name.startswith(("_", ".")))
        return f"---\norphan: true\n---\n\n# {path}\n\n" + "".join(f"- `{name}`\n" for name in names)
    language = {".py": "python", ".toml": "toml", ".html": "html", ".c": "c"}.get(file.suffix, "text")
    return f"---\norphan: true\n---\n\n# {path}\n\n`````{language}\n{file.read_text(encoding='utf-8')}`````\n"
