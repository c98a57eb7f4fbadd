"""The theory: a page for each strategy, of its docstring and equations, a time-line, options and code."""

from __future__ import annotations

import html
import inspect
import re
from dataclasses import fields
from pathlib import Path
from textwrap import dedent
from typing import Final

from tutti.strategies import STRATEGIES, Strategy
from website.equations import block_html
from website.options import strategy_options, table
from website.paths import ROOT
from website.timelines import drawing, trace

_DRAWN: Final = re.compile("[│─┐┘┌└]")
_EQUATION: Final = re.compile(r"^\s*(?:[\w`', ]+:\s+)?[A-Za-z]\w*'?(?:, \w+'?)* = ", re.MULTILINE)
_LEGEND: Final = (
    '<p class="legend"><span class="compute"></span> forward and backward '
    '<span class="exchange"></span> exchange, optimizer, waiting for others</p>'
)


def files() -> dict[str, str]:
    """The places of the pages by the files that define the strategies, as paths in the repository."""
    return {
        str(Path(inspect.getfile(STRATEGIES[name])).resolve().relative_to(ROOT)): f"strategies/{name}.md"
        for name in STRATEGIES
    }


def overview() -> str:
    """The page that lists the strategies."""
    rows = [(f"[`{name}`](strategies/{name}.md)", STRATEGIES.summary(name)) for name in STRATEGIES]
    return (
        "# The strategies, in theory\n\nEach page is made from the file of its strategy: the equations and "
        "sources of its docstring, a time-line of a run, its options and its code. Which one to take is in "
        "[Choose a strategy](choosing-a-strategy.md).\n\n" + table(("strategy", "what it does"), rows)
    )


def page(name: str) -> str:
    """The page of one strategy."""
    kind = STRATEGIES[name]
    text = inspect.getdoc(kind) or ""
    summary, _, rest = text.partition("\n\n")
    names = option_names(kind)
    shown = {field.name: 2 for field in fields(kind) if field.name == "every" and field.default != 1}
    found = trace(kind(**shown))
    drawn = drawing(found, f"{len(found)} virtual workers with {name}: what each of them did when")
    code = Path(inspect.getfile(kind)).read_text(encoding="utf-8")
    return "\n".join(
        [
            f"# {name}\n",
            summary.replace("\n", " ") + "\n",
            f"`tutti train --strategy {name}` · {{py:obj}}`tutti.{kind.__name__}`\n",
            body(rest, names),
            "## A run, drawn\n",
            f"A small model on virtual workers, of which the last is the slowest, {_how(shown)}. The "
            "gradients and exchanges are real; the clock is the virtual one of `tutti.comm.virtual`, with "
            "links of 200 MB/s.\n",
            f'<div class="scroll">{drawn}</div>\n{_LEGEND}\n',
            "## Options\n",
            strategy_options(kind),
            "## The code\n",
            f"```python\n{code}```\n",
        ]
    )


def _how(shown: dict[str, int]) -> str:
    """Say with which options a run was drawn."""
    given = " ".join(f"`--strategy.{name} {value}`" for name, value in shown.items())
    return f"with {given}, so that there is something to see" if given else "with the default options"


def option_names(kind: type[Strategy]) -> list[str]:
    """The names of a strategy's options."""
    return [field.name for field in fields(kind)]


def body(text: str, options: list[str]) -> str:
    """A docstring's text as Markdown, its equations set and its drawings as they are."""
    parts: list[str] = []
    for paragraph in _paragraphs(text):
        match _kind_of(paragraph):
            case "text":
                parts.append(paragraph.replace("<", "&lt;"))
            case "drawing":
                parts.append(f'<pre class="drawing">{html.escape(dedent(paragraph), quote=False)}</pre>')
            case "equation":
                parts.append(block_html(dedent(paragraph), options))
            case _:
                parts.append(f"```text\n{dedent(paragraph)}\n```")
    return "\n\n".join(parts) + "\n"


def blocks(kind: type[Strategy]) -> dict[str, list[str]]:
    """The blocks of a strategy's docstring: its "equation"s, "drawing"s and "table"s."""
    found: dict[str, list[str]] = {"equation": [], "drawing": [], "table": [], "text": []}
    for paragraph in _paragraphs(inspect.getdoc(kind) or ""):
        found[_kind_of(paragraph)].append(dedent(paragraph))
    return found


def _kind_of(paragraph: str) -> str:
    if not paragraph.startswith("    "):
        return "text"
    if _DRAWN.search(paragraph):
        return "drawing"
    return "equation" if _EQUATION.search(paragraph) else "table"


def _paragraphs(text: str) -> list[str]:
    """The paragraphs; one that is indented goes on over empty lines."""
    found: list[str] = []
    for paragraph in text.split("\n\n"):
        if found and paragraph.startswith("    ") and found[-1].startswith("    "):
            found[-1] += "\n\n" + paragraph
        else:
            found.append(paragraph)
    return found
