"""Build the site: `python -m website [FOLDER]`, by default into `build/site`.

The pages are laid out in `build/pages` as the site has them (see `paths.py`), then Sphinx makes HTML of them.
Any warning, such as a link or an anchor that leads nowhere, is an error.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any, Final

from sphinx.cmd.build import main as sphinx

from tutti.allreduce import ALGORITHMS
from tutti.cli.commands import COMMANDS
from tutti.data import BUILT_IN
from tutti.models import MODELS
from tutti.registry import Registry
from tutti.strategies import STRATEGIES
from tutti.training.augmentations import AUGMENTATIONS
from tutti.training.losses import LOSSES
from tutti.training.metrics import METRICS
from website import contents, options, reference, strategies
from website.paths import ROOT, SITE_OF, SiteMap, page_of_file

PARTS: Final[dict[str, tuple[str, Registry[Any]]]] = {
    "Models": ("tutti train NAME, --model.KEY VALUE", MODELS),
    "Data sets": ("--data NAME", BUILT_IN),
    "Losses": ("--loss NAME, --loss.KEY VALUE", LOSSES),
    "Metrics": ("--metrics NAMES", METRICS),
    "Augmentations": ("--augment NAMES, --augment.KEY VALUE", AUGMENTATIONS),
    "All-reduces": ("--strategy sync --strategy.collective NAME", ALGORITHMS),
}


def lay_out(folder: Path) -> None:
    """Write all pages of the site as Markdown, and the pictures beside them."""
    site = SiteMap(strategies.files() | reference.FILES)
    docs = contents.pages_of_docs()
    found = contents.sections((contents.DOCS / "README.md").read_text(encoding="utf-8"), docs)
    made = _made_pages()
    found["Theory"] = ["strategies", *(page for page in made if page.startswith("strategies/"))]
    found["Reference"] = ["options", *(page for page in made if page.startswith(("options/", "reference/")))]
    found["Project"] = [
        "Performance <performance>",
        *(place.removesuffix(".md") for place in SITE_OF.values() if "/" in place),
    ]
    for page in docs:
        text = site.rewrite((contents.DOCS / page).read_text(encoding="utf-8"), f"docs/{page}")
        if page == "README.md":
            text = contents.index_page(text, found)
        _write(folder / site.place(f"docs/{page}"), text)
    for path, place in SITE_OF.items():
        if place != "index.md":
            _write(folder / place, site.rewrite((ROOT / path).read_text(encoding="utf-8"), path))
    for place, text in made.items():
        _write(folder / f"{place}.md", text)
    for path, place in site.wanted.items():
        _write(folder / place, page_of_file(path))
    for picture in (path for kind in ("*.svg", "*.png") for path in contents.DOCS.rglob(kind)):
        target = folder / picture.relative_to(contents.DOCS)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, target)


def _made_pages() -> dict[str, str]:
    """The pages that are made from the code, by their place without `.md`."""
    made = {"strategies": strategies.overview(), "options": options.overview()}
    made |= {f"strategies/{name}": strategies.page(name) for name in STRATEGIES}
    made |= {f"options/{name}": options.command_page(name) for name in COMMANDS}
    made["options/parts"] = options.parts_page(PARTS)
    made |= {"reference/files": reference.files_page(), "reference/exit-codes": reference.exit_codes_page()}
    return made | {page.place.removesuffix(".md"): page.text() for page in reference.pages()}


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def build(target: Path) -> int:
    """Build the site; returns Sphinx's exit code."""
    pages = ROOT / "build" / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    lay_out(pages)
    shutil.rmtree(target, ignore_errors=True)
    here = Path(__file__).parent
    words = ["-W", "--keep-going", "-q", "-j", "auto", "-d", str(ROOT / "build" / "doctrees")]
    return sphinx([*words, "-c", str(here), str(pages), str(target)])


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"))
