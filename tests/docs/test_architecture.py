"""The page on the architecture names files and folders that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`((?:[a-z_]+/)*(?:[a-z_]+\.py|[a-z_]+/))`", PAGE)))


@pytest.mark.parametrize("name", NAMED)
def test_what_the_page_names_is_there(name: str) -> None:
    homes = [ROOT, ROOT / "src" / "tutti", *(ROOT / "src" / "tutti" / home for home in ("comm", "studies"))]
    assert any((home / name).exists() for home in homes)


def test_every_folder_of_the_package_is_on_the_page() -> None:
    folders = [p.name for p in (ROOT / "src" / "tutti").iterdir() if (p / "__init__.py").exists()]
    assert folders
    assert [name for name in folders if f"`{name}/`" not in PAGE] == []
