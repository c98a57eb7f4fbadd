"""The programs and commands of a page, run in the order in which a reader would."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.preloaded import command, interpreter

DOCS = Path(__file__).parents[2] / "docs"
_FENCE = re.compile(r"^```(\w*) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVED = re.compile(r"[Ss]ave this as\s+`([^`]+)`[^`]*$")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        language: the word behind the fence; empty for output and what is not run.
        mark: what follows it, such as "theirs" for code of another library.
        code: the text.
        saved_as: the name of the file that the sentence before it says to save it as.
    """

    language: str
    mark: str
    code: str
    saved_as: str | None


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page of `docs/`."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found, end = [], 0
    for match in _FENCE.finditer(text):
        saved = _SAVED.search(text[end : match.start()].strip())
        found.append(Block(match[1], match[2], match[3], saved[1] if saved else None))
        end = match.end()
    return found


def follow(blocks: list[Block], names: dict[str, Any]) -> None:
    """Do what the blocks say, in the present folder: save files, run programs, type commands.

    Args:
        blocks: of one page, in order.
        names: what the programs that are not saved share.
    """
    for block in blocks:
        if block.mark == "theirs":
            continue
        if block.saved_as is not None:
            Path(block.saved_as).write_text(block.code)
        elif block.language == "python":
            exec(compile(block.code, "page", "exec"), names)
        elif block.language == "bash":
            for line in block.code.splitlines():
                type_in(shlex.split(line, comments=True))


def type_in(words: list[str]) -> None:
    """Run a command in the present folder; it must succeed. What it prints goes where this process prints."""
    match words:
        case []:
            return
        case ["tutti", *rest]:
            line = [*command(), *rest]
        case ["python", *rest]:
            line = [*interpreter(starts_ranks=True), *rest]
        case _:
            raise AssertionError(f"'{shlex.join(words)}' is no command that a page may show in a bash block")
    done = subprocess.run(line, check=False)
    assert done.returncode == 0, shlex.join(words)
