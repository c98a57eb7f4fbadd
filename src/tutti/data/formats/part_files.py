"""Folders with a file for each part of a data set: train.csv and test.csv."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tutti.data.contents import PARTS, Contents, refuse_other_names
from tutti.data.formats import Format, read_files
from tutti.errors import BadData
from tutti.registry import part

_NAME: Final = re.compile(rf"({'|'.join(sorted(PARTS, key=len, reverse=True))})([-_.].*)?\.\w+")
"""Such as train.csv, or train-00000-of-00002.parquet."""


@part("folder of parts")
class PartFiles(Format):
    """Folders whose files are named by their parts: train.csv and test.csv, or several files of each."""

    @staticmethod
    def in_folder(folder: Path) -> bool:
        """Tell whether a folder has a file of the training part."""
        return "train" in _parts(folder)

    @staticmethod
    def read(
        path: Path, missing: str = "error", labelled: bool = True, **options: object
    ) -> Contents[object]:
        """Read the files of each part; further options are those of their format."""
        found = _parts(path)
        pairs = {}
        columns = groups = None
        labels: dict[str, tuple[str, ...]] = {}
        for name in sorted(found, key=["train", "validation", "test"].index):
            contents = read_files(found[name], {**options, "missing": missing}, labelled)
            if set(contents.parts) != {"train"}:
                raise BadData(
                    f"{found[name][0]} has several parts itself, but its name says that it is the {name} "
                    "part; name the file, not its folder"
                )
            if columns not in (None, contents.columns):
                raise BadData(
                    f"the {name} part in {path} has other columns than the training part; give both the "
                    "same, or choose those that both have by --data.columns A,B,..."
                )
            columns = contents.columns
            labels[name] = contents.labels
            refuse_other_names(labels, str(path))
            pairs[name] = contents.parts["train"]
            groups = contents.groups if name == "train" else groups
        name = path.resolve().name
        return Contents(name, pairs, contents.classes, contents.labels, columns or (), groups=groups)

    @staticmethod
    def files(path: Path) -> list[Path]:
        """Return the files of the training part."""
        return _parts(path)["train"]


def _parts(folder: Path) -> dict[str, list[Path]]:
    """The files of each part."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name.lower().removesuffix(".gz"))
        if match and path.is_file() and not path.name.endswith(".npy"):
            found.setdefault(PARTS[match[1]], []).append(path)
    return found
