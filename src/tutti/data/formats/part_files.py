"""Folders with a file for each part of a data set: train.csv and test.csv."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from tutti.data.contents import PARTS, Contents, refuse_other_names
from tutti.data.formats import Format, read_files
from tutti.data.formats.file_list import FileList
from tutti.errors import BadData
from tutti.registry import part

_NAME: Final = re.compile(
    rf"({'|'.join(sorted(PARTS, key=len, reverse=True))})"
    r"(?:[-_.](\d{1,9})(?:[-_]of[-_](\d{1,9}))?(?:-[0-9a-f]{8,})?)?(\.\w+(?:\.gz|\.zst)?)"
)
"""Such as train.csv, or train-00000-of-00002.parquet; Hugging Face has put a checksum behind that."""


@part("folder of parts")
class PartFiles(Format):
    """Folders with a file for each part, train.csv and test.csv, or with numbered ones: train-0.csv, ..."""

    @staticmethod
    def in_folder(folder: Path) -> bool:
        """Tell whether a folder has a file of the training part."""
        return any(name == "train" for name, _, _ in _named(folder))

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
    """Return the files of each part, in the order of their numbers.

    Raises:
        BadData: two files may hold the same samples: a list, or a file without a number, is a whole part; or
            a file is missing.
    """
    found: dict[str, dict[int | None, Path]] = {}
    for name, number, path in _named(folder):
        files = found.setdefault(name, {})
        if files and (number is None or None in files or number in files):
            other = files.get(number, next(iter(files.values())))
            raise BadData(
                f"{folder} has {other.name} and {path.name}, which may hold the same {name} samples; keep "
                "one of them, or name the files that are meant in a list elsewhere"
            )
        files[number] = path
    for files in found.values():
        _refuse_missing(files.values())
    return {
        name: [files[number] for number in sorted(files, key=lambda at: at or 0)]
        for name, files in found.items()
    }


def _refuse_missing(files: Collection[Path]) -> None:
    """Raise BadData if files that say how many they are, as train-00000-of-00004.h5 does, are fewer."""
    matches = [match for path in files if (match := _NAME.fullmatch(path.name.lower())) and match[3]]
    if not matches:
        return
    counts = {int(match[2]): int(match[3]) for match in matches}
    count = max(counts.values())
    first = int(count in counts)  # Numbers are from 0 or from 1.
    missing = next((number for number in range(first, first + count) if counts.get(number) != count), None)
    if missing is not None:
        like = next(match for match in matches if int(match[3]) == count)
        name = (
            f"{like.string[: like.start(2)]}{missing:0{len(like[2])}}{like.string[like.end(2) : like.end(3)]}"
        )
        raise BadData(
            f"{next(iter(files)).parent} lacks {name}{like[4]}; copy it again, or rename the others"
        )


def _named(folder: Path) -> Iterator[tuple[str, int | None, Path]]:
    """Yield the part, the number and the path of each file that is named by a part."""
    for path in sorted(folder.iterdir()):
        match = _NAME.fullmatch(path.name.lower())
        if match and path.is_file() and not path.name.endswith(".npy"):
            whole = match[2] is None or path.name.lower().endswith(FileList.endings)
            yield PARTS[match[1]], None if whole else int(match[2]), path
