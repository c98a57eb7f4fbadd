"""Folders of pictures, with a folder for each class."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from tutti.data.contents import PARTS, Contents
from tutti.data.formats import Format, listed
from tutti.data.pictures import ENDINGS, Pictures, decoded, stamp
from tutti.data.rows import Indices, Rows
from tutti.errors import BadData
from tutti.records.npz import open_data_file
from tutti.records.untrusted import printable
from tutti.registry import part

_ENDINGS: Final = tuple(f".{ending}" for ending in ENDINGS)


@part("image folder")
class ImageFolder(Format):
    """Folders of pictures: cat/1.png, dog/2.png, ...; or train/cat/1.png, test/cat/2.png, ..."""

    @staticmethod
    def in_folder(folder: Path) -> bool:
        """Tell whether a folder has folders of pictures, or nothing but pictures."""
        found = [one for path in _parts(folder).values() for one in _folders(path)]
        files = [one for one in folder.iterdir() if one.is_file() and not one.name.startswith(".")]
        alone = bool(files) and not found and all(one.name.lower().endswith(_ENDINGS) for one in files)
        return alone or any(next(_pictures(one), None) for one in found)

    @staticmethod
    def read(
        path: Path, size: object = None, skip_bad: bool = False, labelled: bool = True
    ) -> Contents[object]:
        """Read the pictures of all classes, in the order of their names.

        Args:
            path: of the folder.
            size: height and width that the pictures are brought to; None: they have one size.
            skip_bad: leave out pictures that cannot be decoded.
            labelled: whether there must be folders for the classes.

        Raises:
            BadData: there is a single class, or a picture that cannot be decoded.
        """
        read = _of_part if labelled else _without_classes
        found = {name: read(folder, size, bool(skip_bad)) for name, folder in _parts(path).items()}
        return Contents(path.resolve().name, found)


def _of_part(folder: Path, size: object, skip_bad: bool) -> tuple[object, object]:
    files: list[Path] = []
    classes: list[str] = []
    for one in _folders(folder):
        own = list(_pictures(one))
        files += own
        classes += [printable(one.name)] * len(own)
    if len(set(classes)) < 2:
        there = listed([one.name for one in _folders(folder)])
        raise BadData(
            f"{folder} has pictures of {'a single class' if classes else 'no class'} (its folders: {there}); "
            "make a folder for each class, with its pictures"
        )

    inputs, good = _decoded(folder, files, size, skip_bad)
    return inputs, np.array(classes, dtype=str)[good]


def _without_classes(folder: Path, size: object, skip_bad: bool) -> tuple[object, None]:
    files = [file for one in (folder, *_folders(folder)) for file in _pictures(one)]
    return _decoded(folder, list(dict.fromkeys(files)), size, skip_bad)[0], None


def _decoded(folder: Path, files: list[Path], size: object, skip_bad: bool) -> tuple[Rows, Indices]:
    """Return the pictures in files, and which of these are good."""

    def content(number: int) -> bytes:
        with open_data_file(files[number]) as file:
            return file.read()

    names = [str(file.relative_to(folder)) for file in files]
    return decoded(Pictures(folder, [stamp(file) for file in files], names, content), size, skip_bad)


def _parts(folder: Path) -> dict[str, Path]:
    """The folders of the parts; the folder itself is the training part if it has no such folders."""
    found = {PARTS[one.name.lower()]: one for one in _folders(folder) if one.name.lower() in PARTS}
    if "train" not in found:
        return {"train": folder}
    return {name: found[name] for name in ("train", "validation", "test") if name in found}


def _folders(folder: Path) -> list[Path]:
    return sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))


def _pictures(folder: Path) -> Iterator[Path]:
    """The pictures in a folder and in those below it, in the order of their names."""
    for at, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            if name.lower().endswith(_ENDINGS) and not name.startswith("."):
                yield Path(at, name)
