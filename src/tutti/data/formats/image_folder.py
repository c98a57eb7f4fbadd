"""Folders of pictures, with a folder for each class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from typing_extensions import override

from tutti.data.contents import PARTS, Contents
from tutti.data.formats import Format
from tutti.data.pictures import ENDINGS, Pictures, decoded, stamp
from tutti.data.tables import listed
from tutti.errors import BadData
from tutti.records.texts import printable
from tutti.registry import part

_ENDINGS: Final = tuple(f".{ending}" for ending in ENDINGS)


@part("image folder")
class ImageFolder(Format):
    """Folders of pictures: cat/1.png, dog/2.png, ...; or train/cat/1.png, test/cat/2.png, ..."""

    options = ("size",)

    @staticmethod
    @override
    def in_folder(folder: Path) -> bool:
        """Return whether a folder has folders of pictures, or nothing but pictures."""
        files = [one.name.lower() for one in folder.iterdir() if one.is_file() and one.name[0] != "."]
        if any(not name.endswith(_ENDINGS) for name in files):
            files = []
        below = [one for path in _parts(folder).values() for one in _folders(path)]
        return bool(files) or any(next(_pictures(one), None) for one in below)

    @staticmethod
    @override
    def read(path: Path, options: Mapping[str, Any], labelled: bool = True) -> Contents[object]:
        """Read the pictures of all classes, in the order of their names."""
        size = options.get("size")
        parts = {name: _of_part(folder, size, labelled) for name, folder in _parts(path).items()}
        return Contents(path.resolve().name, parts)


def _of_part(folder: Path, size: object, labelled: bool) -> tuple[object, object]:
    by_class = {one.name: list(_pictures(one)) for one in _folders(folder)}
    if labelled:
        files = [file for some in by_class.values() for file in some]
        names = [printable(name) for name, some in by_class.items() for _ in some]
        if len(set(names)) < 2:
            raise BadData(
                f"{folder} has pictures of {'a single class' if names else 'no class'} (its folders: "
                f"{listed(list(by_class))}); make a folder for each class, with its pictures"
            )
        targets = np.array(names, dtype=str)
    else:
        files, targets = list(_pictures(folder)), None
    pictures = Pictures(
        folder,
        [stamp(file) for file in files],
        [str(file.relative_to(folder)) for file in files],
        lambda number: files[number].read_bytes(),
    )
    return decoded(pictures, size), targets


def _parts(folder: Path) -> dict[str, Path]:
    """Return the folders of the parts; the folder itself is the training part if it has no such folders."""
    folders = {PARTS[one.name.lower()]: one for one in _folders(folder) if one.name.lower() in PARTS}
    if "train" not in folders:
        return {"train": folder}
    return {name: folders[name] for name in ("train", "validation", "test") if name in folders}


def _folders(folder: Path) -> list[Path]:
    return sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))


def _pictures(folder: Path) -> Iterator[Path]:
    """Yield the pictures in a folder and in those below it, in the order of their names."""
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(one for one in folders if not one.startswith("."))
        for name in sorted(files):
            if name.lower().endswith(_ENDINGS) and not name.startswith("."):
                yield Path(at, name)
