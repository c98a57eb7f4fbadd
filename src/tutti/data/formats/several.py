"""Several files as one data set: listed in a text file, named by a pattern, or a file for each part."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from tutti.data.contents import PARTS, Contents
from tutti.data.formats import Format, in_order, one_by_one, read_files, refuse_other_traits
from tutti.data.schemas import nearest
from tutti.errors import BadData
from tutti.records.npz import open_data_file
from tutti.records.texts import printable
from tutti.registry import part

_NAME: Final = re.compile(
    rf"({'|'.join(sorted(PARTS, key=len, reverse=True))})(?:[-_.](\d{{1,9}})[^.]*)?(\.\w+(?:\.gz|\.zst)?)"
)
"""Such as train.csv, or train-00000-of-00002-0a1b2c3d.parquet, as Hugging Face has them."""


@part("list")
class FileList(Format):
    """Text files with the path of a file in each line, from the folder of the list; # begins a comment."""

    endings = (".txt",)

    @staticmethod
    @override
    def files(path: Path) -> list[Path]:
        with open_data_file(path) as file:
            lines = file.read(1 << 26).decode("utf-8-sig", "replace").splitlines()
        found = []
        for number, line in enumerate(lines, 1):
            name = os.path.expanduser(line.partition("#")[0].strip())
            if name and not os.path.isfile(path.parent / name):
                raise BadData(
                    f"{path} names no file in line {number:,}: there is no '{printable(name[:200])}'"
                )
            if name.lower().endswith(FileList.endings):
                raise BadData(f"{path} lists {printable(name)}, which is a list itself; list its files")
            if name:
                found.append(path.parent / name)
        if not found:
            raise BadData(f"{path} lists no files; write the path of one in each line")
        return found


@part("pattern")
class Pattern(Format):
    """Names with wildcards, 'train-*.tar': the samples of all files are one data set."""

    @staticmethod
    @override
    def files(path: Path) -> list[Path]:
        paths = in_order(map(Path, glob.glob(str(path))))
        if not paths:
            raise BadData(f"no file is called {path}; {nearest(path)}")
        return paths


@part("folder of parts")
class PartFiles(Format):
    """Folders with a file for each part, train.csv and test.csv, or with numbered ones: train-0.csv, ..."""

    @staticmethod
    @override
    def in_folder(folder: Path) -> bool:
        return "train" in _by_part(folder)

    @staticmethod
    @override
    def files(path: Path) -> list[Path]:
        return _by_part(path)["train"]

    @staticmethod
    @override
    def read(path: Path, options: Mapping[str, Any], labelled: bool = True) -> Contents[object]:
        by_part = _by_part(path)
        every = one_by_one(by_part.values(), read_files, options, labelled)
        return of_parts(path.resolve().name, dict(zip(by_part, every, strict=True)), str(path))


def of_parts(title: str, found: Mapping[str, Contents[object]], what: str) -> Contents[object]:
    """Return the contents of each part, the training part first, as one data set; `what` is for messages."""
    for name, one in found.items():
        if set(one.parts) != {"train"}:
            raise BadData(f"the file of the {name} part in {what} has several parts itself; name that file")
    refuse_other_traits({f"the {name} part of {what}": one for name, one in found.items()})
    parts = {name: one.parts["train"] for name, one in found.items()}
    weights = {name: one.weights["train"] for name, one in found.items() if one.weights}
    left_out = {name: one.left_out["train"] for name, one in found.items() if one.left_out}
    return replace(found["train"], name=title, parts=parts, weights=weights, left_out=left_out)


def _by_part(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each part, the training part first."""
    found: dict[str, list[tuple[str | None, str, Path]]] = {
        part: [] for part in ("train", "validation", "test")
    }
    for file in sorted(folder.iterdir()):
        match = _NAME.fullmatch(file.name.lower())
        if match and match[3] != ".npy" and file.is_file():
            found[PARTS[match[1]]].append((match[2], match[3], file))
    for name, files in found.items():
        numbers, endings, paths = zip(*files, strict=True) if files else ((), (), ())
        if len(files) > 1 and (len({*endings}) > 1 or None in numbers or len({*numbers}) < len(files)):
            raise BadData(
                f"{folder} has {' and '.join(path.name for path in paths[:2])}, which may hold the same "
                f"{name} samples; keep one of them, or list the files that are meant in a text file elsewhere"
            )
    return {name: in_order(path for *_, path in files) for name, files in found.items() if files}
