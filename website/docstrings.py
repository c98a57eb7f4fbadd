"""Docstrings as Sphinx reads them: ours are in Google's style with the code of Markdown."""

from __future__ import annotations

import re
from typing import Final

_CODE: Final = re.compile(r"(``[^`]+``|`[^`]+`)")
_SECTION: Final = re.compile(r"^\s*[A-Z][a-z]+:$")


def to_rst(lines: list[str]) -> list[str]:
    """The lines of a docstring as reStructuredText.

    A paragraph that is indented by four more than the text before it is shown as it is, such as an equation
    or a time-line; names between back-ticks are code; nothing else is mark-up.
    """
    found: list[str] = []
    base, verbatim = 0, False
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            found.append("")
            continue
        after_blank = number > 0 and not lines[number - 1].strip()
        if verbatim and indent < base + 4:
            verbatim = False
        if not verbatim and after_blank and indent >= base + 4 and not _in_section(lines, number):
            verbatim = True
            found += [" " * base + ".. code-block:: text", ""]
        if verbatim:
            found.append(line)
            continue
        if not _in_section(lines, number):
            base = indent
        found.append(_inline(line))
    return found


def _in_section(lines: list[str], number: int) -> bool:
    """Tell whether a line belongs to a section such as `Args:`."""
    indent = len(lines[number]) - len(lines[number].lstrip())
    for line in reversed(lines[:number]):
        above = len(line) - len(line.lstrip())
        if line.strip() and above < indent:
            if _SECTION.match(line):
                return True
            indent = above
    return False


def _inline(line: str) -> str:
    pieces = _CODE.split(line)
    for place, piece in enumerate(pieces):
        if place % 2:
            pieces[place] = f"``{piece.strip('`')}``"
        else:
            escaped = re.sub(r"(\*+|\|)", lambda match: "".join("\\" + sign for sign in match[0]), piece)
            pieces[place] = re.sub(r"(?<=\w)_(?!\w)", r"\\_", escaped)
    return "".join(pieces)
