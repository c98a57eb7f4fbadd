"""Names of files with braces, which stand for several files."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Final

from typing_extensions import override

from tutti.data.contents import Contents
from tutti.data.formats import Format, nearest, read_files
from tutti.errors import BadData
from tutti.registry import part

_BRACES: Final = re.compile(r"\{(?:(\d{1,18})\.\.(\d{1,18})|([^{}]*))\}")

_MOST: Final = 1 << 20
"""Files that a pattern may stand for."""


@part("pattern")
class Pattern(Format):
    """Names with braces, 'train-{000..003}.tar' or '{a,b}.csv': the samples of all files are one data set."""

    @staticmethod
    @override
    def check(path: Path) -> None:
        """Refuse a pattern of which a file is missing."""
        for file in _files(path):
            if not file.exists():
                raise BadData(f"there is no {file}, which '{path}' stands for; {nearest(file)}")

    @staticmethod
    @override
    def read(
        path: Path, missing: str = "error", labelled: bool = True, **options: object
    ) -> Contents[object]:
        """Read the files of a pattern; further options are those of their format."""
        Pattern.check(path)
        contents = read_files(_files(path), {**options, "missing": missing}, labelled)
        return replace(contents, name=path.stem)

    @staticmethod
    @override
    def files(path: Path) -> list[Path]:
        """Return the files."""
        return _files(path)


def _files(path: Path) -> list[Path]:
    """The files that a pattern stands for, in its order."""
    texts = _BRACES.split(str(path))
    # Between the texts there are three groups for each pair of braces, of which one or two are there.
    choices = [_choices(path, *texts[at : at + 3]) for at in range(1, len(texts), 4)]
    if prod(map(len, choices)) > _MOST:
        raise BadData(f"'{path}' stands for more than {_MOST:,} files; write them into a list")
    plain = texts[::4]
    return [
        Path("".join(text + one for text, one in zip(plain, (*some, ""), strict=True)))
        for some in product(*choices)
    ]


def _choices(path: Path, first: str | None, last: str | None, listed: str | None) -> list[str]:
    if listed is not None:
        return listed.split(",")
    assert first is not None, "the braces have numbers"
    assert last is not None, "the braces have numbers"
    if not 0 <= int(last) - int(first) < _MOST:
        raise BadData(f"'{path}' counts from {first} to {last}; give up to {_MOST:,} files, ascending")
    return [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
