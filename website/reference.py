"""The reference, from docstrings: a page for each group of public names, the files of a run, exit codes."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from importlib import import_module
from typing import Final

from website.docstrings import to_rst
from website.paths import ROOT

TITLES: Final = {
    "run": "Training",
    "training": "Training",
    "own_loop": "A training loop of your own",
    "strategies": "Strategies",
    "studies": "Cross-validation, searches, ensembles",
    "records": "Records of a run",
    "comm": "Communicators",
    "errors": "Errors",
}
"""The headings of `tutti`'s names, by the folder or module that defines them, in their order on the site."""

FOLDERS: Final = {
    "A run": "run_folder",
    "Its checkpoints": "checkpoints",
    "A cross-validation or a search": "farm_folder",
    "A comparison": "comparison",
    "An ensemble": "ensemble",
}
"""The modules of `tutti.records` whose docstrings list the files of a folder."""

FILES: Final = {
    "src/tutti/records/run_folder.py": "reference/files.md",
    "src/tutti/errors.py": "reference/exit-codes.md",
}
"""The files of the repository for which a page of the reference stands."""


@dataclass(frozen=True)
class ReferencePage:
    """A page of the reference.

    Attributes:
        place: its path on the site.
        title: its heading.
        about: the text below it.
        names: the public names with an entry, in full.
        elsewhere: public names of the module whose entry is on a page of `tutti`.
    """

    place: str
    title: str
    about: str
    names: tuple[str, ...]
    elsewhere: tuple[str, ...] = ()

    def text(self) -> str:
        """The page as Markdown."""
        parts = [f"# {self.title}\n", self.about + "\n"]
        if self.elsewhere:
            links = ", ".join(f"{{py:obj}}`{name}`" for name in self.elsewhere)
            parts.append(f"Also exported here: {links}.\n")
        parts += [f"```{{eval-rst}}\n{_directive(name)}\n```\n" for name in self.names]
        return "\n".join(parts)


def public_modules() -> list[str]:
    """The modules that say with `__all__` which of their names are public."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        if re.search(r"^__all__ = ", path.read_text(encoding="utf-8"), re.MULTILINE):
            parts = path.relative_to(ROOT / "src").with_suffix("").parts
            found.append(".".join(part for part in parts if part != "__init__"))
    return found


def pages() -> list[ReferencePage]:
    """All pages of the reference: those of `tutti` by subject, then one for each public module."""
    tutti = import_module("tutti")
    groups: dict[str, list[str]] = {title: [] for title in TITLES.values()}
    for name in tutti.__all__:
        home = str(getattr(getattr(tutti, name), "__module__", "tutti.records.run"))
        groups.setdefault(TITLES.get(home.split(".")[1], "Further names"), []).append(f"tutti.{name}")
    found = [
        ReferencePage(f"reference/{_slug(title)}.md", title, "`import tutti`", tuple(names))
        for title, names in groups.items()
        if names
    ]
    known = {id(getattr(tutti, name)): f"tutti.{name}" for name in tutti.__all__}
    return found + [_module_page(name, known) for name in public_modules() if name != "tutti"]


def files_page() -> str:
    """The page of the files that commands write."""
    parts = [f"## {title}\n\n{_lists(f'tutti.records.{name}')}" for title, name in FOLDERS.items()]
    return "\n".join(["# Files of a run folder\n", *parts])


def exit_codes_page() -> str:
    """The page of exit codes, and of the errors that they stand for."""
    return f"# Exit codes\n\n{_lists('tutti.errors')}"


def _lists(module: str) -> str:
    """What a module's docstring says after its first line."""
    lines = to_rst((inspect.getdoc(import_module(module)) or "").splitlines())
    return "\n".join(["```{eval-rst}", *lines[1:], "```\n"])


def _module_page(name: str, known: dict[int, str]) -> ReferencePage:
    module = import_module(name)
    own = [one for one in module.__all__ if id(getattr(module, one)) not in known]
    elsewhere = [known[id(getattr(module, one))] for one in module.__all__ if one not in own]
    about = (inspect.getdoc(module) or "").partition("\n\n")[0].replace("\n", " ")
    names = tuple(f"{name}.{one}" for one in own)
    return ReferencePage(f"reference/{name}.md", f"`{name}`", about, names, tuple(elsewhere))


def _slug(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def _directive(name: str) -> str:
    module, _, attribute = name.rpartition(".")
    value = getattr(import_module(module), attribute)
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, BaseException) else "class"
        bases = "" if value.__bases__ == (object,) else "\n   :show-inheritance:"
        return f".. auto{kind}:: {name}\n   :members:{bases}"
    if inspect.isroutine(value):
        return f".. autofunction:: {name}"
    return f".. autodata:: {name}\n   :no-value:"
